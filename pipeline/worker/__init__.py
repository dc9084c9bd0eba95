"""What runs in the training process. Nothing here knows of studies, experiments or MLflow.

Except for `script`, once somebody's own training begins: it opens `pipeline.script_run` then.
"""
