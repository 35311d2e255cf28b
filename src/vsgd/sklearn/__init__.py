"""scikit-learn estimators: linear models without learning rate, schedule or feature scaling."""

from vsgd.errors import needs_extra

with needs_extra("vsgd.sklearn", "sklearn"):
    from vsgd.sklearn.classifier import VSGDClassifier
    from vsgd.sklearn.merging import fit_parts
    from vsgd.sklearn.regressor import VSGDRegressor

__all__ = ["VSGDClassifier", "VSGDRegressor", "fit_parts"]
