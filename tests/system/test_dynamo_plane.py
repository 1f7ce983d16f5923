"""Baton's frontend over Dynamo's runtime, with doubles of workers: APIs, errors, lost workers, cards."""

import asyncio
import base64
import signal
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path

import httpx
import pytest

from baton.dynamo.plane import DynamoPlane
from baton.dynamo.runtime import start_runtime
from baton.errors import WorkerUnreached
from baton.messages import KvHandoff, Role, after_handoff
from tests import dynamo_double as double
from tests.dynamo_stack import DynamoStack, under_streams
from tests.requests import token_request
from tests.stack import MODEL
from tests.waiting import FAILOVER_S, PATIENCE_S, until, wait_for


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DynamoStack]:
    """A prefill and a decode worker."""
    with DynamoStack(tmp_path_factory.mktemp("dynamo")) as stack:
        stack.start_fleet("prefill", "decode")
        yield stack


@pytest.mark.parametrize(
    ("seed", "status", "code"),
    [
        (double.REFUSES, 400, "invalid_request"),
        (double.FAILS, 500, "engine_failure"),
        (double.FAILS_AS_DATA, 500, "engine_failure"),
        (double.SHUTS_DOWN, 502, "worker_lost"),
    ],
)
def test_errors_of_workers_have_batons_codes_and_no_tracebacks(
    fleet: DynamoStack, seed: int, status: int, code: str
) -> None:
    answer = fleet.post("/v1/completions", prompt="Hi", max_tokens=4, seed=seed)

    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "Traceback" not in answer.text
    fleet.wait_ready(1, 1)


def test_fields_that_nobody_knows_are_ignored(fleet: DynamoStack) -> None:
    usage = fleet.answer("/v1/completions", prompt="Hi", max_tokens=4, seed=double.IS_STRANGE)["usage"]
    assert usage["completion_tokens"] == 4


def test_the_port_for_answers_listens_on_loopback_only(fleet: DynamoStack) -> None:
    listening = fleet.processes[0].listening()
    assert len(listening) > 1
    assert {address for address, _ in listening} == {"0100007F"}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_client_that_leaves_leaves_no_kv_behind(phase: str, tmp_path: Path) -> None:
    with DynamoStack(tmp_path) as stack:
        stack.start_fleet("prefill", "decode", flags=("--prefill-s", "0.5", "--step-s", "0.05"))
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 1000, "stream": True}
        for _ in range(3):
            with httpx.stream(
                "POST", f"{stack.url}/v1/completions", json=body, timeout=PATIENCE_S, verify=False
            ) as answer:
                if phase == "decode":
                    next(answer.iter_lines())
        # Each prefill ends, and decode is asked for what it handed over.
        wait_for(lambda: stack.processes[1].text().count("pinned") == 3 and stack.num_pins == 0)
        assert stack.answer("/v1/completions", prompt="Hi", max_tokens=2)["usage"]["completion_tokens"] == 2


async def test_kv_that_no_decode_worker_got_is_released(tmp_path: Path) -> None:
    """The client leaves after prefill, or the chosen decode worker is gone."""
    with DynamoStack(tmp_path) as stack:
        prefill, _ = stack.double("prefill"), stack.double("decode")
        lost = stack.double("decode", "--endpoint", "dynamo.lost.generate")
        environ = {"DYN_FILE_KV": stack.environ["DYN_FILE_KV"]}
        paths = [f"dynamo.{name}.generate" for name in ("prefill", "backend", "lost")]
        plane = DynamoPlane(partial(start_runtime, "file", "127.0.0.1", {}, environ), paths, 2.0)
        async with asyncio.timeout(PATIENCE_S), aclosing(plane.watch()) as snapshots:
            async for workers in snapshots:
                if len(workers) == 3:
                    break
            source = next(worker for worker in workers if worker.role is Role.PREFILL)
            request = token_request([1, 2, 3], model=source.model)
            async with aclosing(plane.call(source.address, request)) as replies:
                assert isinstance(await anext(replies), KvHandoff)
                assert stack.num_pins == 1
            await until(lambda: stack.num_pins == 0)

            (gone,) = (worker for worker in workers if worker.endpoint == "dyn://dynamo.lost.generate")
            async with aclosing(plane.call(source.address, request)) as replies:
                handoff = await anext(replies)
                assert isinstance(handoff, KvHandoff)
                lost.kill()
                decoding = aclosing(plane.call(gone.address, after_handoff(request, handoff)))
                async with decoding as decoded, asyncio.TaskGroup() as group:
                    ended = group.create_task(anext(replies, None))  # as Generator reads both
                    with pytest.raises(WorkerUnreached):
                        await anext(decoded)
                assert ended.result() is None
            await until(lambda: stack.num_pins == 0)
            assert prefill.text().count("pinned") == 2
        await plane.close()


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.slow), "decode"])
def test_killed_workers_lose_no_stream(role: str, tmp_path: Path) -> None:
    with DynamoStack(tmp_path) as stack:
        workers = stack.start_fleet("prefill", "prefill", "decode", "decode", flags=("--step-s", "0.01"))
        victim = workers[0 if role == "prefill" else 2]

        reads = under_streams(stack, 8, victim.kill, max_tokens=200)

        assert max(read.longest_gap_s for read in reads) < FAILOVER_S


def test_a_killed_prefill_worker_fails_no_new_request(tmp_path: Path) -> None:
    with DynamoStack(tmp_path) as stack:
        workers = stack.start_fleet("prefill", "prefill", "decode")
        workers[0].kill()
        for _ in range(4):
            assert stack.post("/v1/completions", prompt="Hi", max_tokens=2).status_code == 200


@pytest.mark.slow
def test_a_frozen_decode_workers_streams_go_on_and_it_is_used_again(tmp_path: Path, own_etcd: str) -> None:
    with DynamoStack(tmp_path, {"BATON_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": own_etcd}) as stack:
        flags = ("--step-s", "0.01", "--registry", "etcd")
        frozen = stack.start_fleet("prefill", "decode", "decode", flags=flags)[1]

        reads = under_streams(stack, 8, lambda: frozen.signal(signal.SIGSTOP), max_tokens=150)

        assert max(read.longest_gap_s for read in reads) < FAILOVER_S
        frozen.signal(signal.SIGCONT)
        stack.wait_ready(1, 2)


@pytest.mark.slow
def test_a_drained_worker_ends_its_streams_and_its_replacement_serves(tmp_path: Path) -> None:
    with DynamoStack(tmp_path) as stack:
        old = stack.start_fleet("prefill", "decode")[1]

        def replace() -> None:
            stack.double("decode")
            stack.wait_ready(1, 2)
            old.signal(signal.SIGTERM)

        under_streams(stack, 4, replace, max_tokens=1500)
        assert old.wait() == 0
        assert stack.post("/v1/completions", prompt="Hi", max_tokens=2).status_code == 200


def test_sampled_streams_are_made_again_from_their_beginning(tmp_path: Path) -> None:
    with DynamoStack(tmp_path) as stack:
        workers = stack.start_fleet("prefill", "decode", "decode", flags=("--step-s", "0.01"))
        under_streams(stack, 4, workers[1].kill, max_tokens=200, temperature=1.0, seed=5)


def test_what_cannot_be_served_is_in_health_with_a_sentence(tmp_path: Path) -> None:
    with DynamoStack(tmp_path) as stack:
        stack.start_fleet("prefill", "decode")
        stack.double("prefill", "--pushes")
        stack.double("decode", "--reads-text")
        stack.double("decode", "--context-length", "999999999")
        stack.double("decode", "--context-length", "2000")

        def reasons() -> str:
            return " | ".join(stack.health()["refused"])

        wait_for(lambda: len(stack.health()["refused"]) == 3)
        assert all(words in reasons() for words in ("pushed", "model input", "999999999"))
        wait_for(lambda: "; 2000 are served" in str(stack.health()["doubts"]))
        for _ in range(4):
            assert stack.post("/v1/completions", prompt="Hi", max_tokens=2).status_code == 200


@pytest.mark.slow
def test_workers_of_batons_are_not_paired_with_dynamos(tmp_path: Path) -> None:
    with DynamoStack(tmp_path) as stack:
        stack.start_fleet("prefill", "decode")
        stack.worker("prefill")
        wait_for(lambda: stack.health()["refused_pairs"])
        assert "engine mocker is not dynamo" in stack.health()["refused_pairs"][0]
        for _ in range(4):
            assert stack.post("/v1/completions", prompt="Hi", max_tokens=2).status_code == 200


def test_requests_wait_for_workers_that_are_full(tmp_path: Path) -> None:
    with DynamoStack(tmp_path) as stack:
        stack.start_fleet("prefill", "decode", flags=("--slots", "2", "--step-s", "0.01"))
        under_streams(stack, 24, None, max_tokens=30)


def test_if_decode_refuses_another_engines_handoff_it_prefills_by_itself(tmp_path: Path) -> None:
    with DynamoStack(tmp_path) as stack:
        stack.frontend()
        stack.double("prefill", "--engine", "other")
        stack.double("decode")
        stack.wait_ready(1, 1)
        assert stack.post("/v1/completions", prompt="Hi", max_tokens=2).status_code == 200
        assert "the handoff is of another engine" in stack.processes[0].text()


def _pair(*texts: str) -> dict[str, str]:
    """A key and its value as etcd reads them."""
    names = ("key", "value")
    return dict(zip(names, (base64.b64encode(text.encode()).decode() for text in texts), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("plane", ["tcp", "nats"])
def test_etcd_with_thousands_of_foreign_keys(
    plane: str, tmp_path: Path, own_etcd: str, nats_server: str
) -> None:
    with httpx.Client(base_url=own_etcd, verify=False, timeout=PATIENCE_S) as etcd:
        for first in range(0, 4000, 100):
            puts = [{"requestPut": _pair(f"v1/mdc/x/{first + i}", "{}")} for i in range(100)]
            etcd.post("/v3/kv/txn", json={"success": puts}).raise_for_status()
    environ = {"BATON_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": own_etcd, "NATS_SERVER": nats_server}
    with DynamoStack(tmp_path, environ | {"DYN_REQUEST_PLANE": plane}) as stack:
        flags = ("--registry", "etcd", "--plane", plane, "--step-s", "0.02")
        victim = stack.start_fleet("prefill", "decode", "decode", flags=flags)[1]
        under_streams(stack, 4, victim.kill, max_tokens=100)


def test_only_short_prompts_are_computed_by_decode(tmp_path: Path) -> None:
    with DynamoStack(tmp_path) as stack:
        stack.frontend("--local-prefill-tokens", "8")
        prefill = stack.double("prefill")
        stack.double("decode")
        stack.wait_ready(1, 1)
        stack.answer("/v1/completions", prompt=[5] * 8, max_tokens=2)
        assert "pinned" not in prefill.text()
        stack.answer("/v1/completions", prompt=[5] * 9, max_tokens=2)
        wait_for(lambda: prefill.text().count("pinned") == 1)


def test_endpoints_may_have_the_operators_names(tmp_path: Path) -> None:
    names = {"BATON_DYNAMO_ENDPOINTS": "mine.first.run,dyn://mine.then.run"}
    with DynamoStack(tmp_path, names) as stack:
        stack.frontend()
        stack.double("prefill", "--endpoint", "mine.first.run")
        stack.double("agg", "--endpoint", "mine.then.run")
        stack.wait_ready(1, 1)
        assert stack.health()["endpoints"] == ["dyn://mine.first.run", "dyn://mine.then.run"]
        assert stack.post("/v1/completions", prompt="Hi", max_tokens=2).status_code == 200


def num_leases(etcd: str) -> int:
    """How many processes hold a place in the registry."""
    found = httpx.post(f"{etcd}/v3/lease/leases", json={}, verify=False, timeout=PATIENCE_S).json()
    return len(found.get("leases", ()))


def test_a_frontend_whose_lease_has_expired_serves_again(tmp_path: Path, own_etcd: str) -> None:
    with DynamoStack(tmp_path, {"BATON_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": own_etcd}) as stack:
        doubles = [stack.double(role, "--registry", "etcd") for role in ("prefill", "decode")]
        wait_for(lambda: num_leases(own_etcd) == 2)
        stack.environ["ETCD_LEASE_TTL"] = "3"
        stack.frontend()
        stack.wait_ready(1, 1)
        frontend = next(each for each in stack.processes if each not in doubles)
        frontend.signal(signal.SIGSTOP)
        wait_for(lambda: num_leases(own_etcd) == 2)
        frontend.signal(signal.SIGCONT)
        wait_for(lambda: num_leases(own_etcd) == 3)
        wait_for(lambda: stack.post("/v1/completions", prompt="Hi", max_tokens=2).status_code == 200)
        assert "dynamo_runtime=ended" in frontend.text()
