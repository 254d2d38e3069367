"""What a run writes for TensorBoard: curves, verdicts and pictures."""

from jaxgoodput.observe.dashboard.stand_ins import stand_ins

# If these are installed, tensorboardX imports them to write into buckets by itself: 1.2 s of CPU.
with stand_ins("boto3", "google.cloud.storage"):
    import tensorboardX  # noqa: F401
