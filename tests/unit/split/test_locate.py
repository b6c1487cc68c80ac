"""Where an index leads in data sets that are strung together, against Python's own lists."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from lightning_echo.split.describe import locate


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any), st.data())
def test_an_index_leads_to_where_a_list_of_all_examples_has_it(lengths, data):
    everything = [(part, index) for part, length in enumerate(lengths) for index in range(length)]
    index = data.draw(st.integers(-len(everything), len(everything) - 1))
    assert locate(list(accumulate(lengths)), index) == everything[index]
