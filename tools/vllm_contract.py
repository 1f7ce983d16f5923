"""Reads what Baton relies on from an installed vLLM: `python tools/vllm_contract.py`, without a GPU.

It writes `tests/doubles/vllm_contract_MAJOR.MINOR.json`. vLLM's double is checked against the newest, and
what Baton uses against each."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any, get_args

FOLDER = Path(__file__).parents[1] / "tests" / "doubles"
CONNECTORS = "vllm.distributed.kv_transfer.kv_connector"
NIXL = f"{CONNECTORS}.v1.nixl"
READ = {
    "vllm.outputs:RequestOutput": ["outputs", "num_cached_tokens", "kv_transfer_params", "metrics"],
    "vllm.outputs:CompletionOutput": ["token_ids", "logprobs", "finish_reason"],
    "vllm.v1.engine.async_llm:AsyncLLM": ["errored"],
    "vllm.v1.metrics.stats:RequestStateStats": ["queued_ts", "scheduled_ts", "first_token_ts"],
    "vllm.v1.metrics.stats:SchedulerStats": [
        "num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "kv_cache_usage",
        "kv_connector_stats",
    ],
    f"{CONNECTORS}.utils:EngineTransferInfo": [
        "remote_tp_size", "remote_block_size", "remote_physical_blocks_per_logical",
    ],
    f"{NIXL}.metadata:NixlHandshakePayload": ["compatibility_hash", "agent_metadata_bytes"],
}  # fmt: skip
PRIVATE = {
    f"{NIXL}.connector:NixlPullConnector": ["__init__", "get_num_new_matched_tokens"],
    f"{NIXL}.pull_worker:NixlPullConnectorWorker": [
        "__init__", "_apply_prefix_caching", "_handle_failed_transfer", "_nixl_handshake",
        "_pop_done_transfers", "_read_blocks", "register_kv_caches", "shutdown",
    ],
    f"{CONNECTORS}.utils:TransferTopology": ["get_engine_info", "tp_ratio"],
}  # fmt: skip
DRAWS = [
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:rejection_sample",
    "vllm.v1.worker.gpu.sample.gumbel:gumbel_sample",
]
WORKER = [
    "_lease_extension", "_reqs_to_process", "_reqs_to_send", "block_len_per_layer",
    "block_size", "engine_id", "kv_caches_base_addr", "nixl_wrapper", "tp_rank", "transfer_topo",
    "world_size", "xfer_handshake_metadata", "xfer_stats",
]  # fmt: skip
SCHEDULER = ["_heartbeat_interval", "_last_heartbeat_time"]
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


def attributes(module: str, names: list[str]) -> dict[str, str]:
    """These attributes, which the patches use, with their annotations, "" without one."""
    kinds: dict[str, str] = {}
    for node in ast.walk(source(f"{NIXL}.{module}")):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            kinds[node.target.attr] = ast.unparse(node.annotation)
        elif isinstance(node, ast.Assign):
            for target in (t for t in node.targets if isinstance(t, ast.Attribute)):
                kinds.setdefault(target.attr, "")
    return {name: kinds[name] for name in names}


def nixl_handshake() -> dict[str, str]:
    """What a worker asks on the side channel, and what `_nixl_handshake` returns."""
    worker = source(f"{NIXL}.base_worker")
    asked = [n for n in ast.walk(worker) if isinstance(n, ast.Tuple) and "GET_META_MSG" in ast.unparse(n)]
    (returned,) = [n for n in ast.walk(worker) if getattr(n, "name", "") == "_nixl_handshake"]
    assert isinstance(returned, ast.FunctionDef)
    assert returned.returns is not None
    return {"asks": ast.unparse(asked[0]), "returns": ast.unparse(returned.returns)}


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
        "nixl_worker": attributes("base_worker", WORKER),
        "nixl_scheduler": attributes("base_scheduler", SCHEDULER),
        "nixl_handshake": nixl_handshake(),
        "private": {
            path.partition(":")[2]: {name: signature(getattr(found(path), name)) for name in names}
            for path, names in PRIVATE.items()
        },
        "compile_factors": compile_factors(),
        "draws": {path.partition(":")[2]: signature(found(path)) for path in DRAWS},
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
    facts = contract()
    release = ".".join(facts["version"].split(".")[:2])
    (FOLDER / f"vllm_contract_{release}.json").write_text(written(facts), encoding="utf-8")
