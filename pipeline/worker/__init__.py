"""What runs in the training process. Nothing here knows of studies, experiments or MLflow."""
