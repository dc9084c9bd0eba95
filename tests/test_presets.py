"""Names, files and values become one configuration, or every problem at once."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.artifacts import config_yaml
from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.layers import Finding
from pipeline.paths import PARAMS, names
from pipeline.presets import asked_for, ladder, resolve

Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a file and returns its path."""

    def write_file(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write_file


def problems(
    preset: str = "adamw", workload: str = "laptop", overrides: Mapping[str, Any] | None = None
) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(preset, workload, overrides or {})
    return list(caught.value.problems)


# Precedence


def test_default_holds_where_nobody_says_otherwise(write: Write) -> None:
    config = resolve(write("p.yaml", "name: p"), write("w.yaml", "name: w"), {})
    assert config.training.micro_batch == 4


def test_workload_file_beats_the_default(write: Write) -> None:
    config = resolve(write("p.yaml", "name: p"), write("w.yaml", "micro_batch: 2"), {})
    assert config.training.micro_batch == 2


def test_preset_file_beats_the_workload_file(write: Write) -> None:
    config = resolve(write("p.yaml", "micro_batch: 3"), write("w.yaml", "micro_batch: 2"), {})
    assert config.training.micro_batch == 3


def test_command_line_beats_the_preset_file(write: Write) -> None:
    config = resolve(write("p.yaml", "micro_batch: 3"), "laptop", {"micro_batch": "5"})
    assert config.training.micro_batch == 5


def test_training_arguments_of_all_layers_are_merged_by_key(write: Write) -> None:
    workload = write("w.yaml", "training_arguments: {weight_decay: 0.1, warmup_steps: 2}")
    preset = write("p.yaml", "training_arguments: {weight_decay: 0.2, adam_beta1: 0.8}")
    config = resolve(preset, workload, {"training_arguments": '{"adam_beta1": 0.7}'})
    assert config.training.training_arguments == {
        "weight_decay": 0.2,
        "warmup_steps": 2,
        "adam_beta1": 0.7,
    }


# The files that ship


def test_every_shipped_file_is_of_a_known_kind() -> None:
    found = [path.relative_to(PARAMS) for path in PARAMS.rglob("*") if path.is_file()]
    by_kind = {kind: sum(path.parts[0] == kind for path in found) for kind in KINDS}
    assert sum(by_kind.values()) == len(found)
    assert all(by_kind[kind] >= least for kind, least in KINDS.items()), by_kind


KINDS = {"presets": 16, "workloads": 4, "ladders": 2, "models": 3, "spaces": 2}


@pytest.mark.parametrize("name", names("presets"))
def test_shipped_preset_resolves_under_its_own_name(name: str) -> None:
    config = resolve(name, "article", {})
    assert config.preset.name == name
    assert config.preset.summary
    assert config.preset.why


@pytest.mark.parametrize("name", names("workloads"))
def test_shipped_workload_resolves_under_its_own_name(name: str) -> None:
    config = resolve("adamw", name, {})
    assert config.workload_name == name
    assert config.workload.model in names("models")


@pytest.mark.parametrize("name", names("ladders"))
def test_every_preset_of_a_shipped_ladder_resolves(name: str) -> None:
    rows = ladder(name).presets
    assert len(rows) >= 2
    for row in rows:
        resolve(row, "article", {})


ARTICLE = {
    "baseline": (4, 1, "adafactor", "fp32", False),
    "accumulation": (1, 4, "adamw_torch_fused", "fp32", False),
    "checkpointing": (1, 4, "adamw_torch_fused", "fp32", True),
    "fp16": (4, 1, "adamw_torch_fused", "fp16", False),
    "adam8bit": (1, 4, "bnb_adam8bit", "fp16", True),
}


def test_article_ladder_has_the_articles_rows_in_order() -> None:
    assert ladder("article").presets == list(ARTICLE)


@pytest.mark.parametrize("name", ARTICLE)
def test_article_row_has_exactly_the_articles_settings(name: str) -> None:
    training = resolve(name, "article", {}).training
    shown = (
        training.micro_batch,
        training.accumulation,
        training.optimizer,
        training.precision,
        training.gradient_checkpointing,
    )
    assert shown == ARTICLE[name]
    assert (training.attention, training.compile, training.alloc_conf) == ("eager", False, None)
    assert training.training_arguments == {}


def test_article_workload_is_the_articles() -> None:
    workload = resolve("baseline", "article", {}).workload
    shown = (workload.model, workload.samples, workload.seq_len, workload.labels, workload.epochs)
    assert shown == ("bert-base", 512, 512, "zeros", 1.0)


# Stacks


def test_stack_has_the_settings_of_all_its_parts() -> None:
    config = resolve("accumulation+gradient_checkpointing+bf16", "article", {})
    training = config.training
    assert (training.micro_batch, training.accumulation) == (1, 4)
    assert training.gradient_checkpointing
    assert training.precision == "bf16"
    assert config.preset.name == "accumulation+gradient_checkpointing+bf16"


def test_stack_of_presets_that_agree_is_no_contradiction() -> None:
    assert resolve("accumulation+checkpointing", "article", {}).training.accumulation == 4


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [("fp16", "bf16", "precision"), ("adafactor", "adamw8bit", "optimizer")],
)
def test_contradiction_names_both_presets_and_the_setting(
    first: str, second: str, key: str
) -> None:
    [problem] = problems(f"{first}+{second}")
    assert all(word in problem for word in (first, second, key, "contradict"))


def test_stack_of_a_name_and_a_file_composes(write: Write) -> None:
    config = resolve(f"bf16+{write('mine.yaml', 'max_grad_norm: 0')}", "article", {})
    assert (config.training.precision, config.training.max_grad_norm) == ("bf16", 0)
    assert config.preset.name == "bf16+mine"


def test_path_may_hold_a_plus(write: Write) -> None:
    config = resolve(write("mine+yours.yaml", "precision: bf16"), "article", {})
    assert (config.training.precision, config.preset.name) == ("bf16", "mine+yours")


# The same value, written differently


def test_number_without_a_dot_is_a_number_although_yaml_reads_text(write: Write) -> None:
    path = write("p.yaml", "learning_rate: 1e-4")
    assert yaml.safe_load(Path(path).read_text())["learning_rate"] == "1e-4", "the trap is there"
    assert resolve(path, "laptop", {}).training.learning_rate == 1e-4


@pytest.mark.parametrize(("word", "value"), [("off", False), ("on", True), ("no", False)])
def test_switch_words_of_yaml_are_switches(write: Write, word: str, value: bool) -> None:
    assert resolve(write("p.yaml", f"compile: {word}"), "laptop", {}).training.compile is value


def test_switch_word_where_a_name_belongs_is_refused_with_its_place(write: Write) -> None:
    path = write("p.yaml", "precision: off")
    [problem] = problems(path)
    assert path in problem
    assert "precision=False" in problem
    assert "fp32" in problem


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"learning_rate": "5e-5"}, {"learning_rate": "0.00005"}),
        ({"micro_batch": "08"}, {"micro_batch": 8}),
        ({"gradient_checkpointing": "true"}, {"gradient_checkpointing": True}),
        ({"gradient_checkpointing": "True"}, {"gradient_checkpointing": "yes"}),
        ({"epochs": "1"}, {"epochs": 1.0}),
        ({"timeout": ""}, {}),
    ],
)
def test_one_value_in_two_spellings_gives_equal_configurations(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> None:
    first, second = resolve("adamw", "laptop", one), resolve("adamw", "laptop", other)
    assert first == second
    assert first.dotted() == second.dotted()


# Problems


def test_unknown_key_of_the_command_line_is_refused_with_the_nearest_one() -> None:
    [problem] = problems(overrides={"learnin_rate": "1e-4"})
    assert problem.startswith("command line: unknown key 'learnin_rate'")
    assert problem.endswith("did you mean 'learning_rate'?")


def test_unknown_key_of_a_file_is_refused_with_the_file(write: Write) -> None:
    path = write("p.yaml", "micro_bach: 2")
    [problem] = problems(path)
    assert problem.startswith(f"{path}: unknown key 'micro_bach'")
    assert problem.endswith("did you mean 'micro_batch'?")


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("weight_decay", "set it in training_arguments"),
        ("report_to", "the run is logged by this project"),
        ("bf16", "set precision"),
    ],
)
def test_argument_of_the_trainer_is_told_its_place(key: str, told: str) -> None:
    [problem] = problems(overrides={key: "1"})
    assert problem.startswith(f"command line: unknown key {key!r}: {told}")


@pytest.mark.parametrize("text", ["preset: bf16", "workload: article"])
def test_choice_that_a_workload_file_cannot_make_is_refused(write: Write, text: str) -> None:
    [problem] = problems(workload=write("w.yaml", text))
    assert "unknown key" in problem


def test_preset_that_names_another_preset_is_refused(write: Write) -> None:
    [problem] = problems(write("p.yaml", "preset: bf16"))
    assert "unknown key 'preset'" in problem


@pytest.mark.parametrize(
    ("preset", "workload", "near"), [("fp61", "laptop", "fp16"), ("adamw", "labtop", "laptop")]
)
def test_unknown_name_is_refused_with_the_nearest_one(
    preset: str, workload: str, near: str
) -> None:
    [problem] = problems(preset, workload)
    assert problem.endswith(f"did you mean {near!r}?")


def test_unknown_optimizer_is_refused_with_the_nearest_one() -> None:
    [problem] = problems(overrides={"optimizer": "adam8bit"})
    assert "optimizer='adam8bit': expected one of adamw_torch, " in problem
    assert "did you mean 'adamw_8bit'?" in problem


def test_all_problems_are_told_at_once(write: Write) -> None:
    path = write("p.yaml", "micro_batch: 0\nprecision: fp17\nunheard: 1")
    overrides = {"seq_len": "-5", "training_arguments": '{"bf16": true}'}
    found = problems(f"{path}+fp61", "labtop", overrides)
    told = ["fp61", "labtop", "unheard", "micro_batch=0", "precision='fp17'", "seq_len='-5'"]
    assert [word for word in [*told, "bf16"] if not any(word in p for p in found)] == []
    assert len(found) == 7


def look(config: RunConfig) -> Iterator[Finding]:
    """Find that no rate goes with any number of samples."""
    yield Finding(("samples", "learning_rate"), f"{config.workload.samples} samples")


def test_what_is_found_in_the_result_is_told_with_the_rest() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("adamw", "laptop", {"micro_batch": "-1"}, look)
    assert [("micro_batch" in p, "256 samples" in p) for p in caught.value.problems] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize(
    ("workload", "overrides"), [("laptop", {"samples": "-1"}), ("labtop", {"samples": "8"})]
)
def test_nothing_is_found_in_settings_that_are_not_known(
    workload: str, overrides: Mapping[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("adamw", workload, overrides, look)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("name", ["micro_batch", "accumulation", "effective_batch"])
@pytest.mark.parametrize("value", ["0", "-1"])
def test_zero_or_negative_batch_is_refused_by_name_and_value(name: str, value: str) -> None:
    [problem] = problems(overrides={name: value})
    assert f"{name}=" in problem
    assert value in problem


def test_malformed_yaml_is_refused_with_file_and_line(write: Write) -> None:
    path = write("p.yaml", "name: p\nmicro_batch: [1, 2\nprecision: bf16\n")
    [problem] = problems(path)
    assert problem.startswith(f"{path}: line 3")


@pytest.mark.parametrize(
    "text",
    ["name: 2023-99-99", "name: !!bool maybe", "name: !!timestamp soon", "name: " + "[" * 2000],
)
def test_value_that_yaml_stumbles_over_is_refused_with_the_file(write: Write, text: str) -> None:
    path = write("p.yaml", text)
    [problem] = problems(path)
    assert problem.startswith(f"{path}: is not valid YAML: ")


def test_key_that_is_there_twice_is_refused_with_its_line(write: Write) -> None:
    path = write("p.yaml", "micro_batch: 2\nprecision: bf16\nmicro_batch: 4\n")
    [problem] = problems(path)
    assert problem.startswith(f"{path}: line 3")
    assert problem.endswith("the key 'micro_batch' is there twice")


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + ".yaml"])
def test_name_that_no_file_can_have_is_refused(name: str) -> None:
    assert len(problems(preset=name)) == 1
    assert len(problems(workload=name)) == 1


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "just words\n", ""])
def test_file_without_keys_is_refused(write: Write, text: str) -> None:
    path = write("p.yaml", text)
    [problem] = problems(path)
    assert problem.startswith(f"{path}: holds ")


def test_missing_file_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "missing.yaml"
    [problem] = problems(str(path))
    assert problem.startswith(f"{path}: cannot be read: ")


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(b"name: \xff\xfe")
    [problem] = problems(str(path))
    assert problem.startswith(f"{path}: cannot be read: ")


def test_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "folder.yaml"
    path.mkdir()
    [problem] = problems(str(path))
    assert problem.startswith(f"{path}: cannot be read: ")


def test_list_with_commas_is_a_ladder_of_its_own() -> None:
    assert ladder("adamw, bf16+sdpa").presets == ["adamw", "bf16+sdpa"]


def test_file_of_a_preset_is_no_ladder(write: Write) -> None:
    path = write("mine.yaml", "micro_batch: 2")
    assert ladder(path).presets == [path]


@pytest.mark.parametrize(
    ("reference", "place"),
    [
        ("{source: x, memory_mib: [1], samples_per_second: [1, 2]}", "reference.memory_mib: 2"),
        ("{source: x, memory_mib: [1, 2]}", "reference.samples_per_second"),
        ("{source: x, memory_mib: [1, -2], samples_per_second: [1, 2]}", "reference.memory_mib.1"),
    ],
)
def test_reference_that_does_not_fit_its_rows_is_refused(
    write: Write, reference: str, place: str
) -> None:
    path = write("l.yaml", f"presets: [adamw, bf16]\nreference: {reference}")
    with pytest.raises(ConfigError, match=re.escape(place)):
        ladder(path)


def test_ladder_without_presets_is_refused(write: Write) -> None:
    with pytest.raises(ConfigError, match="a list of presets is needed"):
        ladder(write("l.yaml", "presets: []"))


# training_arguments


def test_training_argument_that_a_setting_decides_is_refused_with_the_setting() -> None:
    arguments = '{"per_device_train_batch_size": 2}'
    [problem] = problems(overrides={"training_arguments": arguments})
    assert problem.endswith("per_device_train_batch_size: not allowed: set micro_batch")


def test_second_logger_is_refused() -> None:
    [problem] = problems(overrides={"training_arguments": '{"report_to": "mlflow"}'})
    assert "report_to: not allowed" in problem


def test_training_argument_that_does_not_exist_is_refused_with_the_nearest_one() -> None:
    [problem] = problems(overrides={"training_arguments": '{"weight_decya": 0.1}'})
    assert "TrainingArguments has no such field" in problem
    assert "did you mean 'weight_decay'?" in problem


def test_training_argument_whose_name_is_a_number_is_refused(write: Write) -> None:
    problem, *_ = problems(write("p.yaml", "training_arguments: {1: 2}"))
    assert "training_arguments: 1: transformers.TrainingArguments has no such field" in problem


def test_training_arguments_without_end_are_refused() -> None:
    [problem] = problems(overrides={"training_arguments": "[" * 100_000})
    assert "not JSON" in problem


def test_training_arguments_that_are_not_json_are_refused() -> None:
    [problem] = problems(overrides={"training_arguments": "{weight_decay: 0.1"})
    assert "not JSON" in problem


def test_training_arguments_that_are_no_mapping_are_refused() -> None:
    [problem] = problems(overrides={"training_arguments": "[1]"})
    assert "expected a mapping" in problem


# effective_batch


def test_effective_batch_becomes_an_accumulation() -> None:
    training = resolve("adamw", "laptop", {"micro_batch": "2", "effective_batch": "16"}).training
    assert (training.micro_batch, training.accumulation) == (2, 8)


def test_effective_batch_uses_the_micro_batch_of_the_preset() -> None:
    training = resolve("accumulation", "laptop", {"effective_batch": "16"}).training
    assert (training.micro_batch, training.accumulation) == (1, 16)


@pytest.mark.parametrize(
    "overrides",
    [
        {"effective_batch": "8.0", "micro_batch": "4.0", "accumulation": "02"},
        {"effective_batch": 8.0, "micro_batch": 4},
    ],
)
def test_batches_are_numbers_however_they_are_written(overrides: Mapping[str, Any]) -> None:
    training = resolve("adamw", "laptop", overrides).training
    assert (training.micro_batch, training.accumulation) == (4, 2)


@pytest.mark.parametrize("value", ["1.5", "many", "", True])
def test_effective_batch_that_is_no_whole_number_is_refused(value: Any) -> None:
    [problem] = problems(overrides={"effective_batch": value})
    assert problem.endswith(f"effective_batch={value}: expected a whole number above 0")


def test_effective_batch_that_is_no_multiple_is_refused() -> None:
    [problem] = problems(overrides={"micro_batch": "3", "effective_batch": "16"})
    assert "effective_batch=16: expected a multiple of micro_batch=3" in problem


def test_three_batch_settings_that_disagree_are_refused() -> None:
    overrides = {"micro_batch": "2", "accumulation": "4", "effective_batch": "16"}
    [problem] = problems(overrides=overrides)
    assert "give two of the three" in problem


# Back from a run


@pytest.mark.parametrize(
    "overrides",
    [{}, {"training_arguments": '{"weight_decay": 0.1}', "timeout": "5", "learning_rate": "3e-5"}],
)
@pytest.mark.parametrize("preset", ["adam8bit", "expandable_segments+bf16"])
def test_configuration_of_a_run_repeats_it(
    write: Write, preset: str, overrides: Mapping[str, Any]
) -> None:
    config: RunConfig = resolve(preset, "article", overrides)
    assert resolve(write("config.yaml", config_yaml(config)), "article", {}) == config


def test_file_of_an_earlier_run_names_its_workload(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config_yaml(resolve("checkpointing", "article", {})))
    named = asked_for(str(path), "workload")
    assert named == "article"
    assert resolve(str(path), named, {}) == resolve("checkpointing", "article", {})


def test_workload_that_only_an_earlier_run_knew_is_a_name(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("workload: gone\nseq_len: 64\n")
    assert resolve(str(path), "gone", {}).workload_name == "gone"


def test_number_written_two_ways_is_no_contradiction(tmp_path: Path) -> None:
    for name, rate, batch in (("a", "5e-5", 8), ("b", "0.00005", "'08'")):
        text = f"learning_rate: {rate}\neffective_batch: {batch}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    stack = f"{tmp_path / 'a.yaml'}+{tmp_path / 'b.yaml'}"
    assert resolve(stack, "laptop", {}).training.learning_rate == 5e-5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("effective_batch: 8", "effective_batch: 16"),
        ("training_arguments: {weight_decay: 0.1}", "training_arguments: {weight_decay: 0.2}"),
    ],
)
def test_stack_that_wants_two_values_is_refused(tmp_path: Path, one: str, other: str) -> None:
    (tmp_path / "a.yaml").write_text(one)
    (tmp_path / "b.yaml").write_text(other)
    with pytest.raises(ConfigError, match="contradict"):
        resolve(f"{tmp_path / 'a.yaml'}+{tmp_path / 'b.yaml'}", "laptop", {})


def test_effective_batch_of_a_file_survives_another_micro_batch(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("effective_batch: 16\n")
    training = resolve(str(tmp_path / "a.yaml"), "laptop", {"micro_batch": "2"}).training
    assert (training.micro_batch, training.accumulation) == (2, 8)


def test_yes_is_no_number(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("micro_batch: yes\n")
    with pytest.raises(ConfigError, match="micro_batch=True"):
        resolve(str(tmp_path / "a.yaml"), "laptop", {})
