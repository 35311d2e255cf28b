"""Train models on four parts of a data set and merge them. Coefficients are weighted by the data of their column.

The parts could be on four machines; here they are in one process. `vsgd.integrations.dask` and
`vsgd.integrations.spark` do the same on a cluster, and `vsgd fit part-*.csv --jobs 4` with files.
"""

import numpy as np
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split

from vsgd.sklearn import VSGDClassifier, fit_parts


def main() -> None:
    X, y = make_classification(4000, 40, n_informative=20, random_state=0)
    X, X_test, y, y_test = train_test_split(X, y, random_state=0)
    parts = [(X[i::4], y[i::4]) for i in range(4)]

    # a single merge of models that were trained independently
    alone = [VSGDClassifier(random_state=0).partial_fit(*part, classes=[0, 1]) for part in parts]
    merged = VSGDClassifier.merge(alone)
    print("accuracy of each model:", *(f"{model.score(X_test, y_test):.3f}" for model in alone))
    print(f"accuracy of the merged model: {merged.score(X_test, y_test):.3f}")

    # several rounds: in each, every part continues from the merged model
    learned = fit_parts(VSGDClassifier(random_state=0), parts, rounds=5)
    whole = VSGDClassifier(random_state=0, max_iter=5, tol=None).fit(X, y)
    print(f"accuracy after 5 rounds: {learned.score(X_test, y_test):.3f}")
    print(f"accuracy of one model after 5 passes: {whole.score(X_test, y_test):.3f}")
    print("loss of each round:", *np.round(learned.loss_curve_, 3))


if __name__ == "__main__":
    main()
