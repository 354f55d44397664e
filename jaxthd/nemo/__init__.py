"""NeMo's speechlm2 experiments (SALM, SALMAutomodel): their keys, and the settings that they become."""
