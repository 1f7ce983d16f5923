"""Reads what Baton relies on from an installed vLLM: `python tools/vllm_contract.py`, without a GPU.

It writes `tests/doubles/vllm_contract.json`, which vLLM's double is checked against.
"""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any, get_args

FILE = Path(__file__).parents[1] / "tests" / "doubles" / "vllm_contract.json"
NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
READ = {
    "vllm.outputs:RequestOutput": ["outputs", "num_cached_tokens", "kv_transfer_params", "metrics"],
    "vllm.outputs:CompletionOutput": ["token_ids", "logprobs", "finish_reason"],
    "vllm.v1.metrics.stats:RequestStateStats": ["queued_ts", "scheduled_ts", "first_token_ts"],
    "vllm.v1.metrics.stats:SchedulerStats": [
        "num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "kv_cache_usage",
        "kv_connector_stats",
    ],
}  # fmt: skip
CALLED = ["from_engine_args", "generate", "abort", "collective_rpc", "check_health", "shutdown"]
BUILT = [
    "vllm.engine.arg_utils:AsyncEngineArgs",
    "vllm.config:KVTransferConfig",
    "vllm.config:StructuredOutputsConfig",
    "vllm.sampling_params:SamplingParams",
    "vllm.sampling_params:StructuredOutputsParams",
]


def found(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def text(annotation: object) -> str:
    """An annotation as written, without well-known module names."""
    if isinstance(annotation, str):
        return annotation
    if inspect.isclass(annotation) and not get_args(annotation):
        plain = annotation.__module__ == "builtins"
        return annotation.__name__ if plain else f"{annotation.__module__}.{annotation.__name__}"
    return repr(annotation).replace("typing.", "")


def plain(default: object) -> object:
    """A default as JSON."""
    value = getattr(default, "value", default)  # an enum's
    return value if isinstance(value, bool | int | float | str | None) else "<made>"


def fields(cls: Any) -> dict[str, list[object]]:
    """The class's constructor fields: annotation and default by name."""
    if dataclasses.is_dataclass(cls):
        listed = [(f.name, f.type, f.default) for f in dataclasses.fields(cls) if f.init]
    else:
        hints = inspect.get_annotations(cls)
        listed = [(n, hints[n], p.default) for n, p in inspect.signature(cls).parameters.items()]
    return {name: [text(kind), plain(default)] for name, kind, default in listed if name[0] != "_"}


def signature(function: Any) -> list[str]:
    """Parameter names in order: `name=default` for defaults, a star before keyword-only ones."""
    parts, starred = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        given = parameter.default is not parameter.empty
        parts.append(f"{parameter.name}={parameter.default!r}" if given else parameter.name)
    return [part for part in parts if part.partition("=")[0] not in {"self", "usage_context"}]


def source(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def nixl_params() -> list[str]:
    """The keys that prefill returns for decode: the dict of `request_finished`."""
    for node in ast.walk(source(f"{NIXL}.pull_scheduler")):
        if isinstance(node, ast.FunctionDef) and node.name == "request_finished":
            calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
            (built,) = [call for call in calls if getattr(call.func, "id", "") == "dict"]
            return [str(keyword.arg) for keyword in built.keywords]
    raise LookupError("request_finished")


def nixl_worker() -> dict[str, str]:
    """The worker attributes that `patches.release` uses, with their annotations."""
    wanted = {"_reqs_to_send", "_reqs_to_process"}
    return {
        node.target.attr: ast.unparse(node.annotation)
        for node in ast.walk(source(f"{NIXL}.base_worker"))
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Attribute)
        and node.target.attr in wanted
    }


def compile_factors() -> dict[str, list[str]]:
    """What `reuse_compiled` patches: its signature, and which of the side channel's variables count."""
    called = {
        ast.unparse(node.func)
        for module in ("vllm.compilation.backends", "vllm.compilation.caching")
        for node in ast.walk(source(module))
        if isinstance(node, ast.Call) and "compile_factors" in ast.unparse(node.func)
    }
    factors = [name for name in found("vllm.envs:compile_factors")() if "SIDE_CHANNEL" in name]
    return {"called": sorted(called), "side_channel": factors}


def contract() -> dict[str, Any]:
    llm = found("vllm.v1.engine.async_llm:AsyncLLM")
    transfer = importlib.import_module("vllm.distributed.kv_transfer")
    for name in ("has_kv_transfer_group", "get_kv_transfer_group"):
        assert callable(getattr(transfer, name))
    for path, names in READ.items():
        cls = found(path)
        known = set(inspect.signature(cls).parameters) | set(dir(cls))
        assert known >= set(names), (path, set(names) - known)
    return {
        "about": "Facts of vLLM, written by tools/vllm_contract.py: [annotation, default]; signatures.",
        "version": importlib.import_module("vllm").__version__,
        **{path.partition(":")[2]: fields(found(path)) for path in BUILT},
        "read": {path.partition(":")[2]: names for path, names in READ.items()},
        "AsyncLLM": {name: signature(getattr(llm, name)) for name in CALLED},
        "RequestOutputKind": {
            kind.name: kind.value for kind in found("vllm.sampling_params:RequestOutputKind")
        },
        "finish_reasons": list(found("vllm.v1.engine:FINISH_REASON_STRINGS")),
        "nixl_params": nixl_params(),
        "nixl_worker": nixl_worker(),
        "compile_factors": compile_factors(),
    }


def written(facts: dict[str, Any]) -> str:
    """JSON with one fact per line."""
    parts = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            parts.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(written(contract()), encoding="utf-8")
