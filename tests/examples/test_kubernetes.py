"""The manifests in examples/kubernetes keep to the schemas, and to what a server says and does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from moe.cli import build_parser
from moe.server.guard import PUBLIC_PATHS
from moe.server.serve import _CLOSE_TIMEOUT_S
from moe.settings import ServerSettings
from moe.settings.profile import profile_names

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs the extra dev")

VERSION = "1.33"
FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
DOCUMENTS = {
    (file.stem, document["kind"]): document
    for file in sorted(FOLDER.glob("*.yaml"))
    for document in yaml.safe_load_all(file.read_text())
}
TEMPLATE = {"type": "object", "required": ["metadata", "spec"]}  # checked as a PodTemplate below
LEADER_WORKER_SET = {
    # What of the CRD leaderworkerset.x-k8s.io/v1 is used.
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["leaderWorkerTemplate"],
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["workerTemplate"],
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {"enum": ["Default", "None", "RecreateGroupOnPodRestart"]},
                        "leaderTemplate": TEMPLATE,
                        "workerTemplate": TEMPLATE,
                    },
                },
            },
        },
    },
}


def templates() -> dict[str, dict[str, Any]]:
    """The pod templates of all manifests."""
    group = DOCUMENTS["ranks", "LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return {
        "one box": DOCUMENTS["one-box", "Deployment"]["spec"]["template"],
        "leader": group["leaderTemplate"],
        "worker": group["workerTemplate"],
    }


def container(template: dict[str, Any]) -> dict[str, Any]:
    (only,) = template["spec"]["containers"]
    return dict(only)


@pytest.mark.parametrize("document", DOCUMENTS, ids="-".join)
def test_manifests_keep_to_their_schemas(document: tuple[str, str]) -> None:
    if document[1] == "LeaderWorkerSet":
        jsonschema_rs.validate(LEADER_WORKER_SET, DOCUMENTS[document])
    else:
        kubernetes_validate.validate(DOCUMENTS[document], VERSION, strict=True)


def test_the_checker_finds_a_misspelled_field() -> None:
    template = {"template": templates()["one box"] | {"spek": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "PodTemplate", **template}, VERSION, strict=True
        )


@pytest.mark.parametrize("name", ["one box", "leader", "worker"])
def test_pods_drain_and_are_contained(name: str) -> None:
    template = templates()[name]
    pod = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
    kubernetes_validate.validate(pod, VERSION, strict=True)
    spec, only = template["spec"], container(template)
    ends = ServerSettings().drain_timeout_s + 2 * _CLOSE_TIMEOUT_S  # the engine, and connections
    before = only.get("lifecycle", {"preStop": {"sleep": {"seconds": 0}}})["preStop"]["sleep"]
    grace = spec["terminationGracePeriodSeconds"]
    assert 0 <= grace - before["seconds"] - ends <= 20
    assert spec["securityContext"]["runAsNonRoot"]
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {mount["name"] for mount in only["volumeMounts"]}
    assert mounts == {volume["name"] for volume in spec["volumes"]}
    claims = {DOCUMENTS[key]["metadata"]["name"] for key in DOCUMENTS if "Claim" in key[1]}
    assert {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in spec["volumes"]
        if "persistentVolumeClaim" in volume
    } <= claims


@pytest.mark.parametrize("name", ["one box", "leader"])
def test_probes_and_services_ask_where_the_server_answers(name: str) -> None:
    template = templates()[name]
    only = container(template)
    words = only["args"] if len(only["args"]) > 1 else only["args"][0].split("moe ")[-1].split()
    arguments = build_parser().parse_args(words)
    assert arguments.host == "0.0.0.0"
    assert arguments.profile in profile_names()
    assert only["ports"] == [{"name": "http", "containerPort": arguments.port}]
    paths = {
        probe: only[probe]["httpGet"]["path"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert paths == {
        "startupProbe": "/health",
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }
    assert set(paths.values()) <= PUBLIC_PATHS  # probes send no key
    service = DOCUMENTS["one-box" if name == "one box" else "ranks", "Service"]["spec"]
    assert service["selector"].items() <= template["metadata"]["labels"].items()
    assert [port["targetPort"] for port in service["ports"]] == ["http"]


def test_workers_are_ranks_and_speak_no_http() -> None:
    worker, leader = (container(templates()[name]) for name in ("worker", "leader"))
    assert worker["args"] == leader["args"]
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # `Launch` reads them
        assert f"{variable}=" in worker["args"][0]
    assert not {"ports", "startupProbe", "livenessProbe", "readinessProbe"} & worker.keys()
