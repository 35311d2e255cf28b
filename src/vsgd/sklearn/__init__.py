"""scikit-learn estimators: linear models with no learning rate, no schedule, and no need to scale the features."""

from vsgd.errors import needs_extra

with needs_extra("vsgd.sklearn", "sklearn"):
    from vsgd.sklearn.classifier import VSGDClassifier
    from vsgd.sklearn.merging import fit_parts
    from vsgd.sklearn.regressor import VSGDRegressor

__all__ = ["VSGDClassifier", "VSGDRegressor", "fit_parts"]
