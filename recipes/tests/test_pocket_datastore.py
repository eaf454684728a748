"""The command that builds pocket's datastore."""

from recipes.pocket import corpus, datastore
from specjax.data.datastore import load_datastore
from specjax.loading.hub import pocket_folder

WEIGHTS = pocket_folder().parent


def test_the_datastore_holds_pieces_of_the_training_modules(tmp_path):
    datastore.build(datastore.Options(tmp_path / "made", num_tokens=500))
    made = load_datastore(tmp_path / "made")
    assert 500 <= made.metadata.num_tokens < 1500
    assert made.metadata.num_documents < len(corpus.pieces(held_out=False))
    assert made.metadata.fingerprint == load_datastore(WEIGHTS / "datastore").metadata.fingerprint
