"""Operations, one class each, and the functions that apply them to tensors."""
