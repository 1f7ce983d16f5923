"""NVIDIA Dynamo's registry and request plane, through the bindings of its runtime (`ai-dynamo-runtime`)."""
