"""A data set of numbers, in a module that worker processes of loaders can import."""

NUM_SAMPLES = 96


class Numbers:
    """A data set as torch's: `len()` and `[]`."""

    def __init__(self, num_samples=NUM_SAMPLES):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return {"id": index}
