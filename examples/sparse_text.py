"""Classify messages by their words: raw counts, without scaling and without a learning rate.

The last lines of the output show that rare words have larger learning rates than frequent ones.
"""

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline

from vsgd.sklearn import VSGDClassifier

COMMON = [
    "the",
    "a",
    "of",
    "and",
    "to",
    "in",
    "is",
    "it",
    "that",
    "for",
    "on",
    "with",
    "as",
    "was",
    "at",
    "by",
    "this",
    "be",
    "are",
    "from",
]
SPORT = ["team", "goal", "match", "player", "season", "league", "coach", "score", "win", "ball"]
SPACE = ["orbit", "moon", "rocket", "launch", "planet", "probe", "star", "mission", "crater", "comet"]


def messages(count: int, rng: np.random.Generator) -> tuple[list[str], list[str]]:
    """Return messages and topics. A message has 20 common words, three of its topic and one of the other."""
    texts, topics = [], []
    for _ in range(count):
        topic, words, others = ("sport", SPORT, SPACE) if rng.random() < 0.5 else ("space", SPACE, SPORT)
        fall = 1 / np.arange(1, 11)
        chosen = [*rng.choice(COMMON, 20), *rng.choice(words, 3, p=fall / fall.sum()), *rng.choice(others, 1)]
        texts.append(" ".join(chosen))
        topics.append(topic)
    return texts, topics


def main() -> None:
    texts, topics = messages(4000, np.random.default_rng(0))
    train, test, y_train, y_test = train_test_split(texts, topics, random_state=0)
    model = make_pipeline(CountVectorizer(), VSGDClassifier(random_state=0)).fit(train, y_train)
    print(f"accuracy on new messages: {model.score(test, y_test):.3f}")

    words, classifier = model[0].get_feature_names_out(), model[1]
    order = np.argsort(classifier.coef_[0])
    print("space:", *words[order[:5]])
    print("sport:", *words[order[-5:]])

    counts = np.asarray(model[0].transform(train).sum(axis=0)).ravel()
    for name, chosen in (("frequent", counts > np.median(counts)), ("rare", counts <= np.median(counts))):
        print(f"median learning rate of {name} words: {np.median(classifier.rates_[0, chosen]):.2g}")


if __name__ == "__main__":
    main()
