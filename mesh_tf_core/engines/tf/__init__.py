"""TensorFlow's engines."""
