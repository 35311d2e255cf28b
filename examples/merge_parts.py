"""Four parts of a data set, learned apart and merged: each coefficient by who has seen more of its column.

The parts could be on four machines. Here they are in one process; `vsgd.integrations.dask` and
`vsgd.integrations.spark` run the same rounds on a cluster, and `vsgd fit part-*.csv --jobs 4` on files.
"""

import numpy as np
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split

from vsgd.sklearn import VSGDClassifier, fit_parts


def main() -> None:
    X, y = make_classification(4000, 40, n_informative=20, random_state=0)
    X, X_test, y, y_test = train_test_split(X, y, random_state=0)
    parts = [(X[i::4], y[i::4]) for i in range(4)]

    # by hand: models that never saw each other's rows
    alone = [VSGDClassifier(random_state=0).partial_fit(*part, classes=[0, 1]) for part in parts]
    merged = VSGDClassifier.merge(alone)
    print("accuracy of each alone:", *(f"{model.score(X_test, y_test):.3f}" for model in alone))
    print(f"accuracy merged: {merged.score(X_test, y_test):.3f}")

    # in rounds: each part goes on from the merged model, whose rows count once
    learned = fit_parts(VSGDClassifier(random_state=0), parts, rounds=5)
    whole = VSGDClassifier(random_state=0, max_iter=5, tol=None).fit(X, y)
    print(f"accuracy after 5 rounds: {learned.score(X_test, y_test):.3f}")
    print(f"accuracy of one model after 5 passes: {whole.score(X_test, y_test):.3f}")
    print("loss of each round:", *np.round(learned.loss_curve_, 3))


if __name__ == "__main__":
    main()
