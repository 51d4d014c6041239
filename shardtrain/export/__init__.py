"""Export a run's weights as a plain file: ``python -m shardtrain.export run=RUN_DIR out=FILE``."""
