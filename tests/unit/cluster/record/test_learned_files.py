"""The record of learning lies beside the trajectories that it is of."""

from cluster.contracts.learned import written_learned
from cluster.record.learned_files import learned_name, learned_of
from cluster.record.storage import Storage


def test_it_has_the_name_of_its_trajectories_in_a_folder_of_its_own():
    assert learned_name("trajectories/step-000012.arrow") == "learned/step-000012.arrow"
    assert learned_name("trajectories/step-000012-0123456789ab.arrow") == "learned/step-000012-0123456789ab.arrow"


def test_a_step_without_one_has_none(tmp_path):
    files = Storage(str(tmp_path))
    assert learned_of(files, "trajectories/step-000001.arrow") is None
    files.write_file("learned/step-000001.arrow", written_learned([], policy_version=0))
    learned = learned_of(files, "trajectories/step-000001.arrow")
    assert learned is not None and learned.policy_version == 0
