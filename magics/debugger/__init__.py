"""Connect a front end's debugger to the cells of the ranks."""
