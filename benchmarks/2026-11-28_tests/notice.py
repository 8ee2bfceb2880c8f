#!/usr/bin/env python3
"""Which test notices which mutant of `mutate.py`, by binaries that are built already.

    notice.py BINARIES.json CHOSEN.json REPORT.json [--jobs N] [--only N,N] [--tests REGEX] [--ran REPORT.json] [--least SECONDS]

BINARIES.json: a list of {"package", "name", "dir", "path"}, a test binary each. First every test runs by itself without a mutant: its seconds, and the
mutants that it comes to. Then each mutant is tried on the tests that come to it, those of its own crate first and short ones before long ones, up to
the first that fails, and does not fail without the mutant. A test that takes ten times as long, and `--least` seconds, has failed. `--ran` takes the
first part from another report; `--tests` tries these tests alone.
"""
import argparse, concurrent.futures, json, os, re, signal, subprocess, sys, tempfile, threading, time

parser = argparse.ArgumentParser()
parser.add_argument("binaries"), parser.add_argument("chosen"), parser.add_argument("report")
parser.add_argument("--jobs", type=int, default=os.cpu_count()), parser.add_argument("--only")
parser.add_argument("--least", type=float, default=60), parser.add_argument("--ran"), parser.add_argument("--tests", default="")
args = parser.parse_args()
binaries = json.load(open(args.binaries))
mutants = json.load(open(args.chosen))


def call(test, env, limit):
    """Seconds, and None or how it failed."""
    began = time.monotonic()
    child = subprocess.Popen(
        [test["path"], "--exact", test["test"]],
        cwd=test["dir"], env={**os.environ, **env}, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )
    try:
        out, _ = child.communicate(timeout=limit)
        failed = None if child.returncode == 0 else f"exit code {child.returncode}"
    except subprocess.TimeoutExpired:
        failed, out = "out of time", ""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()
    said = [line for line in out.split("\n") if "panicked at" in line]
    return time.monotonic() - began, failed, (said or [""])[0], out


def baseline(test):
    with tempfile.TemporaryDirectory() as folder:
        reached = os.path.join(folder, "reached")
        seconds, failed, _, out = call(test, {"MUTANT_REACHED": reached}, 500)
        numbers = set(map(int, open(reached).read().split())) if os.path.exists(reached) else set()
    return {**test, "seconds": seconds, "failed": failed, "reached": sorted(numbers), "out": out[-2000:] if failed else ""}


def run_all():
    tests = []
    for binary in binaries:
        listed = subprocess.run([binary["path"], "--list", "--format", "terse"], cwd=binary["dir"], capture_output=True, text=True).stdout
        ignored = subprocess.run([binary["path"], "--list", "--format", "terse", "--ignored"], cwd=binary["dir"], capture_output=True, text=True).stdout
        ignored = set(ignored.split("\n"))
        tests += [{**binary, "test": line.removesuffix(": test")} for line in listed.split("\n") if line.endswith(": test") and line not in ignored]
    began = time.monotonic()
    # What takes long first, were it known: binaries of training and of the command.
    tests.sort(key=lambda test: (test["name"] not in ("train", "command", "cpu"), test["name"]))
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        ran = list(pool.map(baseline, tests))
    whole = time.monotonic() - began
    print(f"{len(ran)} tests in {whole:.0f} s, {sum(t['seconds'] for t in ran):.0f} s one by one; failed without a mutant:", flush=True)
    for test in ran:
        if test["failed"]:
            print(f"  {test['name']} {test['test']}: {test['failed']}\n    {test['out'][-300:]!r}", flush=True)

    return ran


places = {binary["name"]: binary for binary in binaries}
if args.ran:
    ran = [{**test, **places[test["name"]]} for test in json.load(open(args.ran))["tests"] if test["name"] in places]
else:
    ran = run_all()
report = {"tests": [{k: t[k] for k in ("package", "name", "test", "seconds", "failed", "reached")} for t in ran], "mutants": []}
only = set(map(int, args.only.split(","))) if args.only else None
lists, state, lock, queue = {}, {}, threading.Lock(), []
for number, mutant in enumerate(mutants):
    if only is not None and number not in only:
        continue
    own = mutant["package"]
    reaching = [t for t in ran if number in t["reached"] and re.search(args.tests, f"{t['name']} {t['test']}")]
    reaching.sort(key=lambda t: (t["package"] != own, t["seconds"]))
    state[number] = {"number": number, "name": mutant["name"], "package": own, "reached_by": len(reaching), "tried": 0, "noticed_by": None}
    queue += [(place, number, test) for place, test in enumerate(reaching)]
queue.sort(key=lambda item: item[:2])


def attempt(item):
    _, number, test = item
    mine = state[number]
    if mine["noticed_by"]:
        return
    seconds, failed, said, _ = call(test, {"MUTANT": str(number)}, max(args.least, 10 * test["seconds"]))
    if failed and call(test, {}, 500)[1]:
        print(f"{test['name']} {test['test']} fails without a mutant", flush=True)
        return
    with lock:
        mine["tried"] += 1
        if failed and not mine["noticed_by"]:
            mine.update(noticed_by=f"{test['name']} {test['test']}", how=failed, said=said, seconds=round(seconds, 2))
            print(f"{number:3} {mine['name']}: {mine['noticed_by']} ({failed})", flush=True)
            report["mutants"] = [state[n] for n in sorted(state)]
            json.dump(report, open(args.report, "w"), indent=1)


with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
    list(pool.map(attempt, queue))
report["mutants"] = [state[n] for n in sorted(state)]
json.dump(report, open(args.report, "w"), indent=1)
print("-- not noticed")
for mine in report["mutants"]:
    if not mine["noticed_by"]:
        print(f"{mine['number']:3} {mine['name']}: {mine['tried']} of {mine['reached_by']} tests that come to it")
