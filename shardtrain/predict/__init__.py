"""The classes of images by a run: ``python -m shardtrain.predict run=RUN data.root=FOLDER``."""
