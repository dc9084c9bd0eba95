"""What a run is: frozen, typed and closed. Every setting has its default here and nowhere else."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "pure_bf16"]
Task = Literal["sequence-classification", "masked-lm", "causal-lm"]

# The names of transformers.training_args.OptimizerNames (a test holds that), and the article's own.
Optimizer = Literal[
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_torch_4bit",
    "adamw_torch_8bit",
    "adafactor",
    "ademamix",
    "adagrad",
    "rmsprop",
    "sgd",
    "adamw_bnb_8bit",
    "adamw_8bit",
    "ademamix_8bit",
    "lion_32bit",
    "lion_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "paged_ademamix_32bit",
    "paged_ademamix_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "rmsprop_bnb",
    "rmsprop_bnb_8bit",
    "rmsprop_bnb_32bit",
    "galore_adamw",
    "galore_adafactor",
    "lomo",
    "adalomo",
    "apollo_adamw",
    "stable_adamw",
    "schedule_free_adamw",
    "bnb_adam8bit",
]


def _frozen_mapping(value: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(value))


def _none_if_empty(value: Any) -> Any:
    """Read an empty string as "not set": it is how a command line or a shell says so."""
    return None if isinstance(value, str) and value.strip() in ("", "''", "none", "None") else value


Arguments = Annotated[
    Mapping[str, Any], AfterValidator(_frozen_mapping), PlainSerializer(dict, return_type=dict)
]
Unset = BeforeValidator(_none_if_empty)


class Frozen(BaseModel):
    """Base of our data types: a changed setting is a new object, an unknown one an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Settings(Frozen):
    """Base of the groups of settings that people write."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `yes` and `on` for a number: YAML reads them as true, and Python that as 1."""
        assert info.field_name is not None
        kind = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and kind is not bool and get_origin(kind) is not Literal:
            raise ValueError("true and false (in YAML also yes, no, on and off) do not fit here")
        return value


class Workload(Settings):
    """What is trained, on what, and for how long."""

    model: str = Field("bert-base", description="hub id, folder, configuration file (JSON)")
    init: Literal["random", "pretrained"] = Field(
        "random", description="where the weights are from"
    )
    task: Task = Field("sequence-classification", description="head of the model")
    data: str = Field("random", description="`random` token ids, or a csv, jsonl or parquet file")
    seq_len: PositiveInt = Field(512, description="tokens per sample")
    samples: PositiveInt = Field(512, description="rows of random data; of a file, at most so many")
    labels: Literal["zeros", "random"] = Field(
        "random", description="random data's labels: 0/1, or all 0 as in the article"
    )
    epochs: PositiveFloat = Field(1.0, description="passes over the data")
    max_steps: Annotated[PositiveInt | None, Unset] = Field(
        None, description="optimizer steps; overrides epochs"
    )
    seed: int = Field(42, ge=0, lt=2**32, description="of weights, data order and dropout")


class Training(Settings):
    """How it is trained: the settings that optimizations change."""

    micro_batch: PositiveInt = Field(4, description="samples per forward and backward pass")
    accumulation: PositiveInt = Field(1, description="micro-batches per optimizer step")
    precision: Precision = Field("fp32", description="number format of the computation")
    optimizer: Optimizer = Field(
        "adamw_torch_fused", description="a name of the Trainer's, or bnb_adam8bit"
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass instead of keeping them"
    )
    attention: Literal["eager", "sdpa", "flash_attention_2"] = Field(
        "sdpa", description="attention kernel"
    )
    compile: bool = Field(False, description="torch.compile the model")
    alloc_conf: Annotated[str | None, Unset] = Field(
        None, description="PYTORCH_ALLOC_CONF of the training process"
    )
    max_grad_norm: float = Field(1.0, ge=0, description="gradient clipping; 0 is off")
    learning_rate: PositiveFloat = Field(5e-5, description="peak learning rate")
    training_arguments: Arguments = Field(
        default_factory=lambda: MappingProxyType({}),
        description="further fields of transformers.TrainingArguments (JSON)",
    )

    @property
    def effective_batch(self) -> int:
        """Samples per optimizer step, as asked for."""
        return self.micro_batch * self.accumulation


class Measurement(Settings):
    """How it is measured, and when to give up."""

    measure: Literal["full", "adaptive"] = Field(
        "full", description="the whole training, or until throughput is known within 2 %"
    )
    floor: Annotated[PositiveFloat | None, Unset] = Field(
        None, description="samples/s: adaptive measurement also ends once it is clear of this"
    )
    ceiling_mib: Annotated[PositiveFloat | None, Unset] = Field(
        None, description="adaptive measurement also ends, barely timed, above this peak"
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:INDEX"
    )
    memory_limit_mib: Annotated[PositiveInt | None, Unset] = Field(
        None, description="pretend that the GPU has no more than this"
    )
    warmup_steps: int = Field(
        3,
        ge=1,
        description="first steps that never count as speed; not the learning rate's warm-up",
    )
    period_ms: PositiveFloat = Field(8.0, description="time between two memory readings")
    snapshot: bool = Field(
        False, description="keep torch's memory history of one step (docs.pytorch.org/memory_viz)"
    )
    stall_timeout: PositiveFloat = Field(
        900.0, description="seconds without a finished step after which the training is ended"
    )
    timeout: Annotated[PositiveFloat | None, Unset] = Field(
        None, description="seconds after which the training is ended"
    )


class Label(Frozen):
    """What a set of settings is called, and the words that explain it."""

    name: str
    summary: str = ""
    why: str = ""


class RunConfig(Frozen):
    """One training to be measured, complete: this and the versions repeat it."""

    preset: Label
    workload_name: str
    workload: Workload
    training: Training
    measurement: Measurement

    def dotted(self) -> dict[str, Any]:
        """Return every setting under its dotted name, as MLflow shows it."""
        groups = self.model_dump(include=set(GROUPS))
        values = {
            f"{group}.{key}": value for group in GROUPS for key, value in groups[group].items()
        }
        values["training.effective_batch"] = self.training.effective_batch
        return {"preset.name": self.preset.name, "workload.name": self.workload_name} | values

    def flat(self) -> dict[str, Any]:
        """Return every setting under its own name: the keys of a YAML file."""
        groups = self.model_dump(include=set(GROUPS))
        return {key: value for group in GROUPS for key, value in groups[group].items()}


GROUPS: Mapping[str, type[Settings]] = MappingProxyType(
    {"workload": Workload, "training": Training, "measurement": Measurement}
)
FIELDS: Mapping[str, str] = MappingProxyType(
    {name: group for group, model in GROUPS.items() for name in model.model_fields}
)
DEFAULT_PRESET = "baseline"
DEFAULT_LADDER = "article"
DEFAULT_WORKLOAD = "auto"
