"""How fast a job grows on an idle cluster: its end under `Goodput` and under Pollux's policy, solved exactly.

    python benchmarks/scheduler_alone.py ../shared/data [--applications imagenet yolov3 deepspeech2 cifar10]

The folder holds `pollux` as its artifact ships it: measured tables of each application. A job arrives alone
on 64 devices, in rounds of 60 s with restarts of 30 s. *Twofold*: it is offered at most twice the largest
size that it has run on, as in Pollux's simulator. *Any*: any size at once. Every line has the sizes on the
way. Asked: twofold, no job ends later than under Pollux's policy; any, imagenet ends within 16,500 s, after
at most three smaller sizes.
"""

import argparse
import pathlib

from jaxgoodput.cluster.scheduler import Goodput, Pollux
from jaxgoodput.cluster.simulate import (
    TableTruth,
    TraceJob,
    pollux_settings,
    read_pollux_applications,
    simulate,
    uniform_cluster,
)

APPLICATIONS = ("imagenet", "yolov3", "deepspeech2", "cifar10")
IMAGENET_S = 16_500.0
MOST_SIZES = 3


def alone(application, policy, truth, growth):
    """When a job ends that has 64 devices to itself, and the devices that it had, one after the other."""
    job = TraceJob(
        id="alone", submit_s=0.0, application=application, num_devices=1, global_batch_size=None
    )
    cluster = uniform_cluster("t4", 16, 4)
    found = simulate([job], cluster, policy, truth, settings=pollux_settings(growth=growth))
    (record,) = found.jobs
    sizes = [sum(map(len, stay.devices.values())) for stay in record.intervals]
    return record.finish_s, sizes


def verdict(application, growth, ours_s, theirs_s, sizes):
    """Whether a line shows what is asked."""
    if growth is not None:
        return "ok" if ours_s <= theirs_s else "OVER"
    if application != "imagenet":
        return "-"
    return "ok" if ours_s <= IMAGENET_S and len(sizes) - 1 <= MOST_SIZES else "OVER"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("--applications", nargs="*", default=APPLICATIONS)
    options = parser.parse_args()
    truth = TableTruth(read_pollux_applications(options.data / "pollux" / "traces"))
    heading = ("application", "growth", "Pollux, s", "ours, s", "ratio", "")
    print("{:12s} {:8s} {:>9s} {:>9s} {:>6s} {:5s}".format(*heading) + "sizes: Pollux; ours")
    for growth in (2.0, None):
        for application in options.applications:
            theirs_s, their_sizes = alone(application, Pollux(growth=growth), truth, growth)
            ours_s, sizes = alone(application, Goodput(), truth, growth)
            print(
                f"{application:12s} {'any' if growth is None else 'twofold':8s} {theirs_s:9.0f} "
                f"{ours_s:9.0f} {ours_s / theirs_s:6.3f} "
                f"{verdict(application, growth, ours_s, theirs_s, sizes):4s} "
                f"{' '.join(map(str, their_sizes))}; {' '.join(map(str, sizes))}",
                flush=True,
            )


if __name__ == "__main__":
    main()
