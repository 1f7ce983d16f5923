"""The double's configuration classes."""

from typing import Any

from vllm.contract import dataclass_of


def _check(self: Any) -> None:
    self.engine_id = self.engine_id or f"double-{id(self):x}"
    if self.kv_connector is not None and self.kv_role is None:
        raise ValueError("Please specify kv_role when kv_connector is set")


KVTransferConfig = dataclass_of("KVTransferConfig", __post_init__=_check)
StructuredOutputsConfig = dataclass_of("StructuredOutputsConfig")
