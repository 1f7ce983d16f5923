"""The connector that vLLM creates, one for each role."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker


class NixlPullConnector:
    """Creates the half of its role."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self.engine_id = vllm_config.kv_transfer_config.engine_id
        self.connector_worker = None
        if role == KVConnectorRole.WORKER:
            self.connector_worker = NixlPullConnectorWorker(vllm_config, self.engine_id, kv_cache_config)
