"""Counts executions, not answers: the same ambiguous failures through plain openai-python, through LiteLLM's proxy and through onejob.

A programmable provider (`onejob simulate`) executes each request that it takes on, counts it, and then misbehaves; a second one
behaves. One intent is sent once per cell with the official client; then both ledgers are read. Run it with `make peers`.

Every proxy is given the same two seconds a call. Nothing here is timed but by those limits.
"""

import argparse
import concurrent.futures
import importlib.metadata
import json
import os
import pathlib
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import openai

CALL_SECONDS = 2.0  # what each client or proxy gives one call
KEY = "sk-" + secrets.token_hex(24)  # for everything here that wants one
START_SECONDS = 300  # what a proxy may take to start, on a busy machine
QUIET_SECONDS = 4.0  # after the answer: nothing more arrives at the providers for so long
QUIET_MAX_SECONDS = 40

FAULTS = [
    ("executes, drops the connection before headers", "drop"),
    ("executes, then 504 as from an intermediary", "status=504"),
    ("executes, then 500", "status=500"),
    ("executes, headers and half a body", "half"),
    ("executes, answers after the timeout", "delay=5s"),
]
TWICE = ("executes, answers after 1 s; the user clicks twice", "delay=1s")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(url, method="GET", body=None):
    request = urllib.request.Request(url, data=body, method=method)
    with urllib.request.urlopen(request, timeout=5) as answer:
        return answer.read().decode()


def until_up(url, process, log):
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"it ended at once:\n{log.read_text()[-2000:]}")
        try:
            return get(url)
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    sys.exit(f"not up within {START_SECONDS} s: {url}\n{log.read_text()[-2000:]}")


class Processes:
    """Child processes, each with a log, ended by their own handles."""

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self.children = []

    def start(self, name, words, up, **environment):
        log = self.directory / f"{name}.log"
        with log.open("w") as out:
            child = subprocess.Popen(words, stdout=out, stderr=out, env={**os.environ, **environment}, cwd=self.directory)
        self.children.append(child)
        until_up(up, child, log)

    def end(self):
        for child in reversed(self.children):
            child.terminate()
        for child in self.children:
            try:
                child.wait(timeout=30)
            except subprocess.TimeoutExpired:
                child.kill()


class Provider:
    """A programmable provider with its ledger."""

    def __init__(self, processes, onejob, name):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = [onejob, "simulate", "--listen", f"127.0.0.1:{port}", "--name", name]
        processes.start(name, words, f"{self.url}/healthz")

    def behave(self, words):
        get(f"{self.url}/behaviour", "PUT", words.encode())

    def forget(self):
        get(f"{self.url}/ledger", "DELETE")

    def counts(self):
        ledger = json.loads(get(f"{self.url}/ledger"))
        return ledger["received"], ledger["executed"]


def client(base_url, retries, patience):
    """The official client; `None`: its own default number of retries."""
    options = {} if retries is None else {"max_retries": retries}
    return openai.OpenAI(base_url=base_url, api_key=KEY, timeout=patience, **options)


def told(one, key):
    """Sends the intent and says what its user was told."""
    try:
        answer = one.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "charge once"}], extra_headers={"Idempotency-Key": key}
        )
        return "200 by " + (answer.choices[0].message.content or "?").rsplit(" ", 1)[-1]
    except openai.APITimeoutError:
        return "timeout"
    except openai.APIStatusError as error:
        body = error.body if isinstance(error.body, dict) else {}
        word = re.sub(r"^.*:", "", str(body.get("type", ""))) if "urn:onejob" in str(body.get("type", "")) else ""
        return f"{error.status_code} {word}".strip()
    except openai.APIConnectionError:
        return "connection error"
    except Exception as error:  # an answer that the client cannot read
        return type(error).__name__


def settle(providers):
    """Waits until nothing more arrives, and returns what the providers counted."""
    deadline, last, since = time.monotonic() + QUIET_MAX_SECONDS, None, time.monotonic()
    while time.monotonic() < deadline:
        now = [provider.counts() for provider in providers]
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > QUIET_SECONDS:
            break
        time.sleep(0.1)
    return last


def litellm_config(directory, name, primary, fallback, retries):
    """One model with LiteLLM's own defaults, but for the timeout; with or without a second one to fall back to.

    `retries`: `None` for its own default.
    """
    model = lambda name, url: {
        "model_name": name,
        "litellm_params": {
            "model": "openai/m", "api_base": f"{url}/v1", "api_key": KEY, "timeout": CALL_SECONDS,
        },
    }
    config = {"model_list": [model("m", primary.url)]}
    if fallback is not None:
        config["model_list"].append(model("spare", fallback.url))
        config["litellm_settings"] = {"fallbacks": [{"m": ["spare"]}]}
    if retries is not None:
        config["router_settings"] = {"num_retries": retries}
    path = pathlib.Path(directory) / f"{name}.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


ONEJOB = """
[server]
listen = "127.0.0.1:{port}"
[redis]
data_dir = "{directory}/onejob-data"
[provider.primary]
base_url = "{primary}"
timeouts = {{ total = "2s" }}
[provider.fallback]
base_url = "{fallback}"
timeouts = {{ total = "2s" }}
[route.chat]
providers = ["primary", "fallback"]
gate = "off"
"""


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--onejob", required=True, help="the onejob program")
    arguments.add_argument("--json", help="writes the cells here")
    options = arguments.parse_args()
    onejob = str(pathlib.Path(options.onejob).resolve())
    with tempfile.TemporaryDirectory() as directory:
        processes = Processes(directory)
        try:
            report(options, onejob, directory, processes)
        finally:
            processes.end()


def report(options, onejob, directory, processes):
    primary, fallback = Provider(processes, onejob, "primary"), Provider(processes, onejob, "fallback")
    litellm = str(pathlib.Path(sys.executable).parent / "litellm")
    urls = {}
    proxies = [("litellm", None, None), ("litellm-fallback", fallback, None), ("litellm-once", None, 0), ("litellm-once-fallback", fallback, 0)]
    for name, second, retries in proxies:
        port, config = free_port(), litellm_config(directory, name, primary, second, retries)
        words = [litellm, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
        processes.start(name, words, f"http://127.0.0.1:{port}/health/liveliness", LITELLM_LOCAL_MODEL_COST_MAP="True",
                        LITELLM_MASTER_KEY=KEY)
        urls[name] = f"http://127.0.0.1:{port}/v1"
    port = free_port()
    toml = pathlib.Path(directory) / "onejob.toml"
    toml.write_text(ONEJOB.format(port=port, directory=directory, primary=primary.url, fallback=fallback.url))
    processes.start("onejob", [onejob, "--config", str(toml), "serve"], f"http://127.0.0.1:{port}/readyz")
    urls["onejob"] = f"http://127.0.0.1:{port}/proxy/chat/v1"

    # A proxy makes its own calls of two seconds, so its client waits longer.
    columns = [
        ("openai-python, defaults", client(f"{primary.url}/v1", None, CALL_SECONDS)),
        ("LiteLLM proxy", client(urls["litellm"], 0, 60)),
        ("LiteLLM proxy with a fallback", client(urls["litellm-fallback"], 0, 60)),
        ("LiteLLM proxy, retries off", client(urls["litellm-once"], 0, 60)),
        ("LiteLLM proxy with a fallback, retries off", client(urls["litellm-once-fallback"], 0, 60)),
        ("onejob with a fallback, client's default retries", client(urls["onejob"], None, 60)),
    ]
    cells = []
    for scenario, behaviour in FAULTS + [TWICE]:
        for place, (column, one) in enumerate(columns):
            for provider in (primary, fallback):
                provider.behave("succeed")
                provider.forget()
            primary.behave(behaviour)
            key = f"{behaviour}-{place}"
            clicks = 2 if (scenario, behaviour) == TWICE else 1
            with concurrent.futures.ThreadPoolExecutor(clicks) as pool:
                answers = list(pool.map(lambda _: told(one, key), range(clicks)))
            counted = settle((primary, fallback))
            if "onejob" in column:
                # The same key again is not another intent; for the others it would be one more execution.
                answers.append("later " + told(one, key))
                counted = settle((primary, fallback))
            cells.append({
                "scenario": scenario, "through": column, "answers": answers,
                "requests": sum(received for received, _ in counted), "executions": sum(executed for _, executed in counted),
            })
            print(f"{scenario} | {column}: {cells[-1]['executions']} executions, {answers}", file=sys.stderr)

    version = importlib.metadata.version
    print(f"openai-python {version('openai')}, LiteLLM {version('litellm')}, Python {sys.version.split()[0]}; "
          f"{CALL_SECONDS:.0f} s a call; all else as each comes.\n")
    print("Executions for one intent (what its user was told):\n")
    print("| the provider | " + " | ".join(name for name, _ in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for scenario, _ in FAULTS + [TWICE]:
        row = [cell for cell in cells if cell["scenario"] == scenario]
        print(f"| {scenario} | " + " | ".join(f"**{cell['executions']}** ({', '.join(cell['answers'])})" for cell in row) + " |")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(cells, indent=1))
    worst = max(cell["executions"] for cell in cells if cell["through"].startswith("onejob"))
    if worst > 1:
        sys.exit(f"onejob executed one intent {worst} times")


if __name__ == "__main__":
    main()
