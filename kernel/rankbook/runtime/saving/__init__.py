"""Save and restore the state of a training run and the files of a model.

methods.py         saving methods of the `Accelerator`
state.py           content of a training checkpoint
training_state.py  random states, single files and numbered checkpoint folders
model_files.py     model files for other programs (safetensors, torch.save)
"""
