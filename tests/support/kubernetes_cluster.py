"""A Kubernetes cluster of tests on loopback: its API over HTTP, its controllers, and machines that run pods.

It speaks the part of the API that this project, `kubectl apply` and `kubectl delete` use: discovery, create,
get, list, watch, merge patches, delete and eviction. A token may do what its Role allows. Controllers run
Indexed Jobs, JobSets and garbage collection; a kubelet starts and ends pods through a `Runner`.
"""

import base64
import contextlib
import copy
import http.client
import http.server
import itertools
import json
import pathlib
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from kubernetes_objects import KINDS, OF_KIND, PLURALS, Object, Refused, Store, merged, selects

ADMIN = ""  # without a token everything is allowed: kubectl sends none without TLS
PATH = re.compile(
    "/(?:api/(v1)|apis/([^/]+/[^/]+))(?:/namespaces/([^/]+))?/([a-z]+)(?:/([^/]+))?(?:/([a-z]+))?"
)
INDEX = "batch.kubernetes.io/job-completion-index"
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
TICK_S = 0.01
LIMIT_S = 60.0


class Runner(Protocol):
    """What runs the containers of pods."""

    def start(self, pod: Object, environ: Mapping[str, str]) -> None: ...

    def stop(self, pod: Object) -> None: ...

    def code(self, pod: Object) -> int | None: ...


class Ledger:
    """A Runner that runs nothing, and notes what was started and ended, in order."""

    def __init__(self):
        self.lines: list[tuple[str, str, int, str]] = []  # what, workload, index, uid
        self.words: dict[str, list[str]] = {}  # by uid, the command as the container gets it
        self.environ: dict[str, Mapping[str, str]] = {}
        self.codes: dict[str, int] = {}

    def start(self, pod: Object, environ: Mapping[str, str]) -> None:
        self._note("start", pod)
        uid = pod["metadata"]["uid"]
        self.words[uid] = expanded(pod["spec"]["containers"][0]["command"], environ)
        self.environ[uid] = dict(environ)

    def stop(self, pod: Object) -> None:
        self.codes.setdefault(pod["metadata"]["uid"], 143)

    def code(self, pod: Object) -> int | None:
        code = self.codes.get(pod["metadata"]["uid"])
        if code is not None:
            self._note("end", pod)
        return code

    def _note(self, what: str, pod: Object) -> None:
        metadata = pod["metadata"]
        workload = metadata["labels"].get("job-name", "")
        index = int(metadata["annotations"].get(INDEX, 0))
        self.lines.append((what, workload, index, metadata["uid"]))

    def running(self, workload: str) -> list[int]:
        """The indices of the pods that run now, after checking that no index ever had two at once."""
        now: dict[int, str] = {}
        for what, of, index, uid in self.lines:
            if of == workload and what == "start":
                assert index not in now, f"index {index} of {workload} has two pods"
                now[index] = uid
            elif of == workload:
                assert now.pop(index) == uid
        return sorted(now)

    def starts(self, workload: str) -> list[int]:
        """The index of each pod that was started, in order."""
        return [i for what, of, i, _ in self.lines if (what, of) == ("start", workload)]


def expanded(words: list[str], environ: Mapping[str, str]) -> list[str]:
    """Words of a command with $(NAME) replaced and $$ read as $, as a kubelet does."""

    def put(found: "re.Match[str]") -> str:
        text = found[0]
        return "$" if text == "$$" else environ.get(text[2:-1], text)

    return [re.sub(r"\$\$|\$\([^)]*\)", put, word) for word in words]


class Controllers:
    """The controllers of the cluster. `step` does what is due, under the store's lock."""

    def __init__(self, store: Store, runner: Runner):
        self._store, self._runner = store, runner
        self._numbers = itertools.count()

    def step(self) -> None:
        for jobset in self._store.of("JobSet"):
            self._run_jobset(jobset)
        for job in self._store.of("Job"):
            self._run_job(job)
        self._collect()
        for pod in self._store.of("Pod"):
            self._run_pod(pod)

    def _owned(self, kind: str, owner: Object) -> list[Object]:
        uid = owner["metadata"]["uid"]
        return [
            one
            for one in self._store.of(kind)
            if any(ref["uid"] == uid for ref in one["metadata"].get("ownerReferences", ()))
        ]

    def _run_jobset(self, jobset: Object) -> None:
        if "deletionTimestamp" in jobset["metadata"]:
            return
        name, space = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
        for part in jobset["spec"]["replicatedJobs"]:
            spec, own = part["template"]["spec"], f"{name}-{part['name']}-0"
            child = self._store.objects.get(("Job", space, own))
            if child is None:
                metadata = {"name": own, "ownerReferences": [_owner(jobset)]}
                body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
                self._store.create("Job", space, body)
            else:
                size = {key: spec[key] for key in ("parallelism", "completions")}
                self._store.update(child, merged(child, {"spec": size}))

    def _run_job(self, job: Object) -> None:
        pods = self._owned("Pod", job)
        if "deletionTimestamp" in job["metadata"] or _is_finished(job):
            return
        spec = job["spec"]
        live = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
        done = {_index(pod) for pod in pods if pod["status"]["phase"] == "Succeeded"}
        number = spec["completions"]
        for pod in live:
            if _index(pod) >= number:
                self._store.delete(pod)
        taken = {_index(pod) for pod in live}
        missing = [i for i in range(number) if i not in done | taken]
        room = spec["parallelism"] - len([i for i in taken if i < number])
        for index in missing[: max(room, 0)]:
            self._create_pod(job, index)
        status: Object = {"active": len(live), "succeeded": len(done)}
        if done >= set(range(number)):
            status["conditions"] = [{"type": "Complete", "status": "True"}]
        if status != job.get("status"):
            self._store.update(job, {**job, "status": status}, by_controller=True)

    def _create_pod(self, job: Object, index: int) -> None:
        template = copy.deepcopy(job["spec"]["template"])
        name = f"{job['metadata']['name']}-{index}-{next(self._numbers)}"
        metadata = {
            **template.get("metadata", {}),
            "name": name,
            "annotations": {INDEX: str(index)},
            "ownerReferences": [_owner(job)],
        }
        metadata["labels"] = {
            **metadata.get("labels", {}),
            "job-name": job["metadata"]["name"],
            INDEX: str(index),
        }
        for container in template["spec"]["containers"]:
            container.setdefault("env", []).append(
                {"name": "JOB_COMPLETION_INDEX", "value": str(index)}
            )
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        pod = self._store.create("Pod", job["metadata"]["namespace"], body)
        pod["status"] = {"phase": "Pending"}

    def _collect(self) -> None:
        """Delete what belongs to an owner that is gone, or that waits for it to go."""
        owners = {one["metadata"]["uid"]: one for one in self._store.objects.values()}
        for one in list(self._store.objects.values()):
            refs = one["metadata"].get("ownerReferences", ())
            going = [owners.get(ref["uid"]) for ref in refs]
            if any(x is None or "deletionTimestamp" in x["metadata"] for x in going):
                how = "Foreground" if one["kind"] in ("Job", "JobSet") else "Background"
                self._store.delete(one, how)
        for one in list(self._store.objects.values()):
            if "foregroundDeletion" in one["metadata"].get("finalizers", ()):
                if not any(self._owned(kind, one) for kind in ("Pod", "Job", "Secret")):
                    self._store.remove(one)

    def _run_pod(self, pod: Object) -> None:
        phase = pod["status"]["phase"]
        is_ending = "deletionTimestamp" in pod["metadata"]
        if phase == "Pending":
            if is_ending:
                self._store.remove(pod)
            else:
                self._start(pod)
            return
        if phase == "Running":
            if is_ending:
                self._runner.stop(pod)
            code = self._runner.code(pod)
            if code is None:
                return
            ended = "Failed" if code else "Succeeded"
            pod = self._set_status(pod, phase=ended)
        if is_ending:
            self._store.remove(pod)

    def _start(self, pod: Object) -> None:
        nodes = [n for n in self._store.of("Node") if not n["spec"].get("unschedulable")]
        environ = self._environ(pod)
        if not nodes or environ is None:
            return
        pods = [p["spec"].get("nodeName") for p in self._store.of("Pod")]
        node = min(nodes, key=lambda n: pods.count(n["metadata"]["name"]))
        spec = {**pod["spec"], "nodeName": node["metadata"]["name"]}
        pod = self._store.update(pod, {**pod, "spec": spec}, by_controller=True)
        self._runner.start(self._set_status(pod, phase="Running"), environ)

    def _environ(self, pod: Object) -> dict[str, str] | None:
        """The variables of a pod's container; None while a Secret is missing."""
        container, found = pod["spec"]["containers"][0], {}
        for source in container.get("envFrom", ()):
            key = ("Secret", pod["metadata"]["namespace"], source["secretRef"]["name"])
            if key not in self._store.objects:
                return None
            data = self._store.objects[key]["data"]
            found |= {name: base64.b64decode(value).decode() for name, value in data.items()}
        return found | {one["name"]: one.get("value", "") for one in container.get("env", ())}

    def _set_status(self, pod: Object, **status: Any) -> Object:
        new = {**pod, "status": {**pod["status"], **status}}
        return self._store.update(pod, new, by_controller=True)


def _owner(one: Object) -> Object:
    metadata = one["metadata"]
    return {
        "apiVersion": one["apiVersion"], "kind": one["kind"], "name": metadata["name"],
        "uid": metadata["uid"], "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip


def _index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def _is_finished(job: Object) -> bool:
    return bool(job.get("status", {}).get("conditions"))


class Cluster:
    """The whole cluster; a context manager that leaves no thread, socket or process."""

    def __init__(
        self,
        runner: Runner | None = None,
        *,
        gates: frozenset[str] = frozenset(),
        machines: int = 2,
    ):
        self.ledger = Ledger()
        self.store = Store(gates)
        self.tokens: dict[str, tuple[str, str]] = {}  # namespace and service account of each
        self.requests: list[tuple[str, str, int]] = []  # method, path, status
        self._controllers = Controllers(self.store, runner or self.ledger)
        self._stopping = threading.Event()
        self._server: _Server | None = None
        self._port = 0
        for i in range(machines):
            body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"m{i}"}, "spec": {}}
            self.store.create("Node", "", body)
        self._thread = threading.Thread(target=self._control, name="controllers")
        self.failure: BaseException | None = None

    def __enter__(self) -> "Cluster":
        self.serve()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self.stop_serving()
        self._thread.join()
        if self.failure is not None and exc[0] is None:
            raise self.failure

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def serve(self) -> None:
        """Start the API, at the same port as before."""
        self._server = _Server(("127.0.0.1", self._port), self)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,)).start()

    def stop_serving(self) -> None:
        """End the API and all connections. Controllers go on."""
        if self._server is not None:
            self._server.end()
            self._server = None

    def account(self, folder: pathlib.Path, namespace: str, name: str) -> pathlib.Path:
        """The folder that a pod with a service account mounts."""
        token = f"token-of-{namespace}-{name}"
        self.tokens[token] = namespace, name
        folder.mkdir(parents=True)
        (folder / "token").write_text(token)
        (folder / "namespace").write_text(namespace)
        return folder

    def call(self, method: str, path: str, body: Any = None) -> Object:
        """A request as the administrator. Raises Refused."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port)) as connection:
            kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
            headers = {"Content-Type": kind}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            said = json.loads(response.read())
        if response.status >= 400:
            raise Refused(said["code"], said["reason"], said["message"])
        return said

    def drain(self, node: str) -> list[tuple[str, int]]:
        """Cordon a machine and evict its pods; return workload and index of each."""
        self.call("PATCH", f"/api/v1/nodes/{node}", {"spec": {"unschedulable": True}})
        evicted = []
        for pod in self.call("GET", "/api/v1/pods")["items"]:
            if pod["spec"].get("nodeName") == node and pod["status"]["phase"] == "Running":
                name, space = pod["metadata"]["name"], pod["metadata"]["namespace"]
                eviction = {
                    "apiVersion": "policy/v1",
                    "kind": "Eviction",
                    "metadata": {"name": name},
                }
                self.call("POST", f"/api/v1/namespaces/{space}/pods/{name}/eviction", eviction)
                evicted.append((pod["metadata"]["labels"]["job-name"], _index(pod)))
        return evicted

    def until(self, what: Any, failed: str) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + LIMIT_S
        while not what():
            assert self.failure is None, self.failure
            assert time.monotonic() < deadline, failed
            time.sleep(0.02)

    def _control(self) -> None:
        try:
            while not self._stopping.wait(TICK_S):
                with self.store.lock:
                    self._controllers.step()
        except BaseException as error:
            self.failure = error


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, address: tuple[str, int], cluster: Cluster):
        self.cluster, self.is_ending = cluster, threading.Event()
        self._open: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about connections that `end`, or a client, has closed."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def end(self) -> None:
        self.is_ending.set()
        self.shutdown()
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        with self.cluster.store.lock:
            self.cluster.store.lock.notify_all()
        self.server_close()  # waits for the threads


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _cluster(self) -> Cluster:
        assert isinstance(self.server, _Server)
        return self.server.cluster

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PATCH = do_DELETE = do_GET

    def _answer(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size)) if size else None
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        try:
            if query.get("watch") in ("true", "1"):
                self._watch(url.path, query)
                return
            code, said = 200, self._said(url.path, query, body)
        except Refused as error:
            code, said = error.status["code"], error.status
        self._send(code, said)

    def _send(self, code: int, said: Object) -> None:
        self._cluster.requests.append((self.command, self.path, code))
        text = json.dumps(said).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _said(self, path: str, query: Mapping[str, str], body: Any) -> Object:
        if (found := _discovered(path)) is not None:
            return found
        kind, space, name, part = _parsed(path)
        self._authorize(kind, space, name, part, "list")
        store = self._cluster.store
        with store.lock:
            if self.command == "GET" and name is None:
                return self._list(kind, space, query)
            if self.command == "POST" and part is None:
                return store.create(kind, space or "", body)
            one = store.get(kind, space or "", name or "")
            match self.command:
                case "GET":
                    return one
                case "POST" if part == "eviction":
                    return _evicted(store, one)
                case "PATCH":
                    return store.update(one, merged(one, body))
                case "DELETE":
                    return self._delete(one, body or {}, query)
        raise Refused(405, "MethodNotAllowed", self.command)

    def _delete(self, one: Object, options: Mapping[str, Any], query: Mapping[str, str]) -> Object:
        uid = options.get("preconditions", {}).get("uid", one["metadata"]["uid"])
        if uid != one["metadata"]["uid"]:
            raise Refused(409, "Conflict", "the UID in the precondition does not match")
        how = options.get("propagationPolicy") or query.get("propagationPolicy") or "Background"
        return self._cluster.store.delete(one, how)

    def _authorize(
        self, kind: str, space: str | None, name: str | None, part: str | None, reading: str
    ) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        cluster = self._cluster
        if token == ADMIN:
            return
        if token not in cluster.tokens:
            raise Refused(401, "Unauthorized", "the token is not known")
        verbs = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
        verb = verbs.get(self.command, "get" if name else reading)
        resource = "/".join(filter(None, (OF_KIND[kind][1], part)))
        group = OF_KIND[kind][0].rpartition("/")[0]
        for rule in _rules(cluster.store, *cluster.tokens[token]):
            is_named = name in rule.get("resourceNames", (name,))
            if group in rule["apiGroups"] and resource in rule["resources"] and is_named:
                if verb in rule["verbs"] and space == cluster.tokens[token][0]:
                    return
        raise Refused(403, "Forbidden", f"{cluster.tokens[token]} may not {verb} {resource}")

    def _list(self, kind: str, space: str | None, query: Mapping[str, str]) -> Object:
        store = self._cluster.store
        items = [
            {key: value for key, value in one.items() if key not in ("kind", "apiVersion")}
            for one in store.of(kind, space)
            if _matches(one, query)
        ]
        version = {"resourceVersion": str(store.version)}
        api = OF_KIND[kind][0]
        return {"kind": f"{kind}List", "apiVersion": api, "metadata": version, "items": items}

    def _watch(self, path: str, query: Mapping[str, str]) -> None:
        kind, space, name, part = _parsed(path)
        self._authorize(kind, space, name, part, "watch")
        store, since = self._cluster.store, int(query.get("resourceVersion") or 0)
        is_old = 0 < since < store.forgotten
        expired = Refused(410, "Expired", f"too old resource version: {since}")
        if is_old and since % 2:  # a server may say so in either way
            raise expired
        self._cluster.requests.append((self.command, self.path, 410 if is_old else 200))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if is_old:
            self._chunk({"type": "ERROR", "object": expired.status})
        else:
            self._follow(kind, space, query, since)
        with contextlib.suppress(OSError):
            self.wfile.write(b"0\r\n\r\n")

    def _follow(self, kind: str, space: str | None, query: Mapping[str, str], since: int) -> None:
        store = self._cluster.store
        deadline = time.monotonic() + float(query.get("timeoutSeconds", 300))
        assert isinstance(self.server, _Server)
        while time.monotonic() < deadline and not self.server.is_ending.is_set():
            with store.lock:
                news = [line for line in store.history if line[0] > since]
                if not news:
                    store.lock.wait(0.2)
                    continue
                since = news[-1][0]
                bodies = [
                    {"type": what, "object": copy.deepcopy(one)}
                    for _, what, one in news
                    if one["kind"] == kind
                    and space in (None, one["metadata"].get("namespace"))
                    and _matches(one, query)
                ]
            try:
                for body in bodies:
                    self._chunk(body)
            except OSError:
                return

    def _chunk(self, body: Object) -> None:
        text = json.dumps(body).encode() + b"\n"
        self.wfile.write(b"%x\r\n%b\r\n" % (len(text), text))
        self.wfile.flush()


def _matches(one: Object, query: Mapping[str, str]) -> bool:
    metadata = one["metadata"]
    by_name = query.get("fieldSelector", "").partition("metadata.name=")[2]
    is_named = not by_name or metadata["name"] == by_name
    return is_named and selects(query.get("labelSelector", ""), metadata.get("labels", {}))


def _parsed(path: str) -> tuple[str, str | None, str | None, str | None]:
    """Kind, namespace, name and part of an object."""
    found = PATH.fullmatch(path)
    if found is None or (found[1] or found[2], found[4]) not in PLURALS:
        raise Refused(404, "NotFound", f"{path} is not known here")
    return PLURALS[found[1] or found[2], found[4]], found[3], found[5], found[6]


def _rules(store: Store, namespace: str, account: str) -> Iterator[Object]:
    """What a service account may do in its namespace."""
    with store.lock:
        for binding in store.of("RoleBinding", namespace):
            if any(
                (subject["kind"], subject["name"], subject["namespace"])
                == ("ServiceAccount", account, namespace)
                for subject in binding["subjects"]
            ):
                yield from store.get("Role", namespace, binding["roleRef"]["name"])["rules"]


def _evicted(store: Store, pod: Object) -> Object:
    """Evict a pod, unless a disruption budget forbids it."""
    labels, space = pod["metadata"]["labels"], pod["metadata"]["namespace"]
    for budget in store.of("PodDisruptionBudget", space):
        wanted = budget["spec"]["selector"]["matchLabels"]
        if wanted.items() <= labels.items():
            others = [
                p
                for p in store.of("Pod", space)
                if wanted.items() <= p["metadata"]["labels"].items()
            ]
            away = [p for p in others if "deletionTimestamp" in p["metadata"]]
            if len(away) >= budget["spec"]["maxUnavailable"]:
                raise Refused(429, "TooManyRequests", "it would violate the disruption budget")
    status = {**pod["status"], "conditions": [DISRUPTED]}
    pod = store.update(pod, {**pod, "status": status}, by_controller=True)
    store.delete(pod)
    return {"kind": "Status", "apiVersion": "v1", "status": "Success"}


def _discovered(path: str) -> Object | None:
    """What kubectl asks first: which groups, versions and kinds there are."""
    groups = [version for version in KINDS if "/" in version]
    if path == "/version":
        return {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        named = [
            {
                "name": group.partition("/")[0],
                "versions": [_group(group)],
                "preferredVersion": _group(group),
            }
            for group in groups
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": named}
    version = path.removeprefix("/apis/").removeprefix("/api/")
    if version not in KINDS or path.count("/") > 3:
        return None
    verbs = ["create", "delete", "get", "list", "patch", "watch"]
    resources = [
        {
            "name": plural, "singularName": kind.lower(), "kind": kind,
            "namespaced": kind != "Node", "verbs": verbs,
        }
        for kind, plural in KINDS[version].items()
    ]  # fmt: skip
    return {
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version,
        "resources": resources,
    }  # fmt: skip


def _group(version: str) -> Object:
    return {"groupVersion": version, "version": version.partition("/")[2]}
