"""Texts as vectors, and how near they are to each other. Run: python examples/embeddings.py

Models trained for vectors (Qwen3-Embedding, e5-mistral) do this well; the bundled one, trained to write, shows how.
"""

from quire import LLM

TEXTS = ["The cat sat on the mat.", "A cat was sitting on the mat.", "The ship sailed across the sea."]


def main() -> None:
    llm = LLM("demo")
    vectors = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
    for text, vector in zip(TEXTS, vectors, strict=True):
        # They are of length 1: a product of two is the cosine of the angle between them.
        near = [sum(a * b for a, b in zip(vector, other, strict=True)) for other in vectors]
        print(f"{text:32}", *(f"{one:6.3f}" for one in near))


if __name__ == "__main__":
    main()
