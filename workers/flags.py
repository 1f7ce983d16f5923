"""Worker flags, named as in NVIDIA Dynamo's TensorRT-LLM worker."""

import dataclasses
import re
from pathlib import Path
from typing import Literal

from baton.connect import Wires
from baton.flags import Parsed, flag
from baton.messages import WORKER_NAME, Role
from baton.model_folder import hub_id, model_folder
from baton.telemetry import LogFormat, LogLevel
from workers.settings import SettingsError

EngineName = Literal["embedded", "mocker", "trtllm", "vllm"]
DisaggregationMode = Literal["prefill", "decode", "agg"]
Speculate = Literal["lookup"]

_ENDPOINT = re.compile(r"dyn://[^./]+\.[^./]+\.[^./]+")
_ENDPOINTS = {
    Role.PREFILL: "dyn://dynamo.prefill.generate",
    Role.DECODE: "dyn://dynamo.tensorrt_llm.generate",
}

# Flags for engine settings; they override the YAML.
_SAME = "max_batch_size", "max_queue_size", "max_num_tokens", "max_seq_len", "tensor_parallel_size"
_ENGINE_FLAGS = {name: name for name in (*_SAME, "speculate")} | {
    "free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "expert_parallel_size": "moe_expert_parallel_size",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """The flags of `python -m workers`."""

    engine: EngineName | None = flag(None, "inference engine [the installed one]")
    model_path: Path = flag(
        Path("models/demo"),
        "folder with config.json, weights, tokenizer.json, or its id in the hub's cache",
        alias="--model",
        metavar="DIR",
    )
    served_model_name: str | None = flag(None, "name in the API [the folder's name]", metavar="NAME")
    disaggregation_mode: DisaggregationMode = flag("agg", "role of this worker")
    name: str = flag(
        "",
        "name in metrics, logs and status, kept over restarts, such as decode-0 [its id]",
        env="BATON_WORKER_NAME",
        metavar="NAME",
    )
    extra_engine_args: Path | None = flag(None, "file of engine settings", metavar="YAML")
    override_engine_args: str | None = flag(None, "engine settings that override the YAML", metavar="JSON")
    max_batch_size: int | None = flag(None, "requests in one step", metavar="N", at_least=1)
    max_queue_size: int | None = flag(None, "requests that may wait for a place", metavar="N", at_least=0)
    max_num_tokens: int | None = flag(None, "tokens in one step", metavar="N", at_least=1)
    max_seq_len: int | None = flag(None, "prompt plus answer, in tokens", metavar="N", at_least=2)
    free_gpu_memory_fraction: float | None = flag(
        None, "share of free memory for KV", metavar="F", above=0, at_most=1
    )
    tensor_parallel_size: int | None = flag(None, "GPUs that share each layer", metavar="N", at_least=1)
    expert_parallel_size: int | None = flag(None, "GPUs that share the experts", metavar="N", at_least=1)
    speculate: Speculate | None = flag(
        None, "guess the next tokens of answers from what was written before [off]"
    )
    dyn_reasoning_parser: Literal["gpt_oss"] = flag("gpt_oss", "reasoning parser")
    dyn_tool_call_parser: Literal["harmony"] = flag("harmony", "tool call parser")
    endpoint: str | None = flag(None, "endpoint in discovery [by role]", metavar="DYN")
    drain_timeout_s: float = flag(
        30.0, "time for running requests to finish after SIGTERM", metavar="S", at_least=0
    )
    ready_file: Path | None = flag(
        None, "touched every second while this worker is ready", env="BATON_READY_FILE", metavar="FILE"
    )
    log_level: LogLevel = flag("info", "least severity of messages that are logged")
    log_format: LogFormat = flag("text", "format of the log's lines", env="BATON_LOG_FORMAT")
    check: bool = flag(False, "validate flags and engine settings without starting")
    wires: Wires = dataclasses.field(default_factory=Wires)

    def __post_init__(self) -> None:
        if self.endpoint is not None and not _ENDPOINT.fullmatch(self.endpoint):
            raise ValueError(f"--endpoint {self.endpoint}: must be dyn://namespace.component.endpoint")
        if self.name and not re.fullmatch(WORKER_NAME, self.name):
            raise ValueError(
                f"--name {self.name[:80]!r}: must be 1 to 63 letters, digits, '.', '_' and '-', "
                "beginning with a letter or digit"
            )

    @property
    def role(self) -> Role:
        """An aggregated worker is a decode worker that gets no handoff."""
        return Role.PREFILL if self.disaggregation_mode == "prefill" else Role.DECODE

    @property
    def model(self) -> str:
        return self.served_model_name or self.model_path.resolve().name

    @property
    def route(self) -> str:
        """The endpoint's name in discovery and /health, as in the guides."""
        if self.endpoint is None and self.wires.plane == "dynamo":
            return f"dyn://{self.wires.dynamo_paths[0 if self.role is Role.PREFILL else -1]}"
        return self.endpoint or _ENDPOINTS[self.role]


def with_model_folder(parsed: Parsed[WorkerSettings]) -> Parsed[WorkerSettings]:
    """The settings with the model's folder if its id on the hub was given, which is then also its name.
    Raises SettingsError."""
    settings = parsed.settings
    try:
        folder = model_folder(settings.model_path)
    except ValueError as error:
        raise SettingsError(f"--model-path: {error}") from error
    name = settings.served_model_name or hub_id(settings.model_path)
    return Parsed(dataclasses.replace(settings, model_path=folder, served_model_name=name), parsed.sources)


def typed_engine_flags(parsed: Parsed[WorkerSettings]) -> dict[str, object]:
    """Engine settings given as flags, by key path in the engine's YAML."""
    return {
        path: getattr(parsed.settings, name) for name, path in _ENGINE_FLAGS.items() if parsed.typed(name)
    }
