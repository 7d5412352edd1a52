from lerobot.configs.types import FeatureType, PolicyFeature


def dataset_to_policy_features(features):
    kinds = {"action": FeatureType.ACTION, "observation.state": FeatureType.STATE}
    return {name: PolicyFeature(kinds[name], feature["shape"]) for name, feature in features.items()}
