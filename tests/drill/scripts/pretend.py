"""Speak to a watcher as a training run does, without training: fast, and with faults on request."""

import argparse
import json
import os
import subprocess
import sys
import threading

parser = argparse.ArgumentParser()
parser.add_argument("--updates", type=int, default=12)
parser.add_argument("--fault", default="none")
args = parser.parse_args()

print("a line that the command prints")
if args.fault == "no manager":
    sys.exit(0)
if args.fault == "silent":
    threading.Event().wait()

named = json.loads(os.environ["SAFEPOINT_WATCH"])
rank, is_one_of_several = int(os.environ.get("RANK", "0")), isinstance(named[0], list)
if is_one_of_several:
    named = named[rank]
events, answers = os.open(named[0], os.O_WRONLY), os.open(named[1], os.O_RDONLY)


def tell(event: str, **facts: object) -> None:
    os.write(events, json.dumps({"event": event, **facts}).encode() + b"\n")
    if os.read(answers, 100) == b"state\n":
        tell("state", items={"model": f"{value:x}", "data": str(step)})


folder = os.path.join(os.environ["SAFEPOINT_WATCH_ROOT"], "pretend")
os.makedirs(folder, exist_ok=True)
saved = os.path.join(folder, "saved.json")
step, value, offset = 0, 1, 0
if args.fault == "children":
    forever = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    children = [
        subprocess.Popen(forever, preexec_fn=os.setpgrp),
        subprocess.Popen(forever, start_new_session=True),
    ]
    with open(os.path.join(folder, "children"), "a") as file:
        file.write("".join(f"{child.pid}\n" for child in children))

is_fresh = not os.path.exists(saved)
promise = "exact"
if not is_fresh:
    if args.fault == "crash on resume":
        sys.exit("cannot read the checkpoint")
    with open(saved) as file:
        step, value = json.load(file)
    if args.fault == "reseed":
        value = 1
    if args.fault == "lost position":
        offset = 5
    if args.fault == "lost position, said":
        offset, promise = 5, "approximate"
    if args.fault == "start over":
        step, value, is_fresh = 0, 1, True
if is_one_of_several:
    tell("start", process=os.getpid())
tell("restored", step=step, generation=None if is_fresh else f"step-{step}", promise=promise, is_fresh=is_fresh)

while step < args.updates:
    step, value = step + 1, value * 6364136223846793005 % (1 << 64) + 1
    if args.fault == "not reproducible":
        value ^= os.getpid()
    if args.fault == "apart" and rank == 1 and step == 5:
        continue
    ids = [4 * step + offset + index for index in range(4)]
    metrics = {} if args.fault == "no metrics" else {"loss": float(value).hex()}
    tell("update", step=step, metrics=metrics, ids={"data": ids}, streams=f"{value:x}")
    if args.fault == "die at 5" and step == 5:
        sys.exit(3)
    if step % 3 == 0 and args.fault != "no save":
        for phase in ("stage", "plan", "write", "vote", "check", "publish"):
            tell("phase", phase=phase)
            if phase == "publish" and rank == 0:
                with open(saved + ".part", "w") as file:
                    json.dump([step, value], file)
                os.replace(saved + ".part", saved)
        tell("committed", step=step, generation=f"step-{step}")
tell("closed")
