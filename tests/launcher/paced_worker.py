"""A worker of a job whose hosts come and go that computes nothing: its steps are pauses.

    python paced_worker.py NUM_STEPS SPLIT HOSTS

It takes part in every generation as a run does, and reports its speed: `SAMPLE_S` per sample, on a host "x3"
three times that. SPLIT is "even" or "leased". A step takes as long as with HOSTS, such as a,b,x3; with fewer
of them, as with the fastest ones.
"""

import os
import re
import sys
import time

from jaxgoodput.launcher.elastic.fitness import Pace
from jaxgoodput.launcher.release_plan import part_s
from jaxgoodput.train.process import joined
from jaxgoodput.train.runs.membership import OwnPart

BATCH, SAMPLE_S = 12, 0.008


def times_of(host):
    named = re.fullmatch(r"x(\d+)", host)
    return int(named[1]) if named else 1


def main(num_steps, split, hosts):
    link = joined()
    membership = link.membership
    whole, is_leased = BATCH, split == "leased"
    part = 1 if is_leased else whole // len(hosts)
    own_s = times_of(os.environ["JAXGOODPUT_HOST"]) * SAMPLE_S
    step = 0
    while step < num_steps:
        generation = membership.enter(None, None)
        left = sorted(times_of(host) * SAMPLE_S for host in hosts)[: generation.process_count]
        kind = Pace(sample_s=0.0, step_s=0.0, part=part, whole=whole, is_leased=is_leased)
        step_s = part_s(left, kind, whole)
        link.beat(step)
        beat_s = time.monotonic()
        while step < num_steps and not membership.is_broken():
            time.sleep(step_s)
            step += 1
            num_samples = max(whole // len(left), 1)
            membership.computed(
                OwnPart(
                    seconds=own_s * num_samples,
                    num_samples=num_samples,
                    part=part,
                    whole=whole,
                    is_leased=is_leased,
                    left=(num_steps - step) * whole,
                )
            )
            if time.monotonic() - beat_s > 0.5:
                beat_s = time.monotonic()
                link.beat(step)
    membership.done()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3].split(","))
