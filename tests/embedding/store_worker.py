"""Writes rows, commits and compacts until it is killed; prints what it has committed.

python store_worker.py FOLDER SEED
"""

import sys

import numpy as np

from jaxgoodput.embedding.store import RowStore

NUM_IDS = 3000


def rows_of(ids, versions):
    rows = np.empty((len(ids), 8), np.uint64)
    rows[:, 0], rows[:, 1] = ids, versions
    rows[:, 2:] = rows[:, :1] * np.uint64(7) + rows[:, 1:2]
    return rows


def main(folder, seed):
    rng = np.random.default_rng(seed)
    with RowStore(folder, row_bytes=64, segment_bytes=2**18) as store:
        everything = np.arange(NUM_IDS)
        if store.newest is None:
            number, versions = 0, np.zeros(NUM_IDS, np.uint64)
            store.put(everything, rows_of(everything, versions))
            store.commit({"round": 0, "versions": versions.tolist()})
        else:
            number = store.newest.about["round"]
            versions = np.array(store.newest.about["versions"], np.uint64)
        print("writing", flush=True)
        while True:
            number += 1
            for _ in range(4):
                ids = rng.permutation(NUM_IDS)[:700]
                versions[ids] = number
                store.put(ids, rows_of(ids, versions[ids]))
            store.commit({"round": number, "versions": versions.tolist()})
            print(number, store.traffic.num_compactions, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
