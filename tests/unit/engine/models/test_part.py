import torch

from tandem.engine.models.part import Part

WHOLE = torch.arange(4 * 6 * 5).view(4, 6, 5)
# Experts 1 and 2, and of these the second third of gates and of ups.
PART = Part((4, 6, 5), ((range(1, 3),), (range(1, 2), range(4, 5)), (range(2, 4),)))


def test_a_part_is_cut_on_every_axis() -> None:
    assert torch.equal(PART.of(WHOLE), WHOLE[1:3][:, [1, 4]][:, :, 2:4])
    assert PART.of(WHOLE).shape == PART.shape
    assert not PART.is_whole


def test_rows_of_parts_are_found_in_the_whole() -> None:
    rows = WHOLE.flatten(0, 1)[torch.from_numpy(PART.row_indices())]
    assert torch.equal(rows[:, PART.columns], PART.of(WHOLE).flatten(0, 1))


def test_one_range_is_a_view() -> None:
    rows = Part((4, 6, 5), ((range(1, 3),), None, None))
    assert rows.of(WHOLE).data_ptr() == WHOLE[1].data_ptr()


def test_a_whole_tensor_has_all_rows_and_columns() -> None:
    whole = Part((3,), (None,))
    assert whole.is_whole and whole.row_indices().tolist() == [0] and whole.columns == slice(0, 3)
