"""The connector that vLLM creates, one for each role."""

from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker


class NixlPullConnector:
    """Creates the half of its role."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self.engine_id = vllm_config.kv_transfer_config.engine_id
        self.connector_worker = None
        self.connector_scheduler = SimpleNamespace(_heartbeat_interval=20, _last_heartbeat_time=0.0)
        if role == KVConnectorRole.WORKER:
            self.connector_worker = NixlPullConnectorWorker(vllm_config, self.engine_id, kv_cache_config)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """The rest of the whole prompt, if its KV is elsewhere."""
        is_elsewhere = (request.kv_transfer_params or {}).get("do_remote_prefill")
        num_tokens = request.num_prompt_tokens - num_computed_tokens if is_elsewhere else 0
        return num_tokens, num_tokens > 0
