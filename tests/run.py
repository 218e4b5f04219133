"""
Run the suite on real engines: ``python -m tests.run [ENGINE …] [-- PYTEST ARGUMENTS]``.

Starts a throwaway server for each engine, gives pytest its address by the environment, and stops it, also when
interrupted. Without engines: sqlite, postgresql and mariadb. An engine that cannot be started is a failure.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext

from tests.servers import SERVERS

ENGINES = ("sqlite", "postgresql", "mariadb")


def main(arguments: list[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    engines, extra = arguments[:split] or list(ENGINES), arguments[split + 1 :]
    if unknown := set(engines) - set(ENGINES):
        print(f"Unknown engine {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}.", file=sys.stderr)
        return 2
    # A plain kill must stop the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    statuses = {engine: _run(engine, extra) for engine in engines}
    for engine, status in statuses.items():
        print(f"{engine}: {'passed' if status == 0 else f'FAILED ({status})'}", flush=True)
    return max(statuses.values())


def _run(engine: str, extra: list[str]) -> int:
    print(f"==> {engine}", flush=True)
    with tempfile.TemporaryDirectory(prefix="dlocks-tests-") as directory:
        server = SERVERS[engine]() if engine in SERVERS else nullcontext()
        try:
            with server:
                environment = getattr(server, "environment", {"DLOCKS_TEST_ENGINE": engine})
                environment = {**os.environ, "DLOCKS_TEST_DIRECTORY": directory, **environment}
                process = subprocess.Popen([sys.executable, "-m", "pytest", *extra], env=environment)
                try:
                    return process.wait()
                except BaseException:
                    process.send_signal(signal.SIGINT)
                    try:
                        process.wait(20)
                    except subprocess.TimeoutExpired:
                        process.kill()
                    raise
        except KeyboardInterrupt:
            sys.exit(130)
        except (FileNotFoundError, RuntimeError) as error:
            print(f"{engine} could not be started: {error}", file=sys.stderr, flush=True)
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
