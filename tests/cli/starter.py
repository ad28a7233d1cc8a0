"""Starts the command line many times at the price of one import: each line of input is a job for a forked process.

A job is a line of JSON, [folder, words, file for the output]. Written back are the number of the process, and how it
ended when it has.
"""

import json
import os
import runpy
import sys

import lit_cond.cli  # noqa: F401  (what takes the time)


def child(folder, words, output):
    os.chdir(folder)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["lit_cond", *words]
    try:
        runpy.run_module("lit_cond", run_name="__main__", alter_sys=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def main():
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                child(*json.loads(line))
            except SystemExit as error:
                os._exit(int(error.code or 0))
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
