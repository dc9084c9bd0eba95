"""The right card, and what a training takes of it, against a driver made of plain data."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import nvml

MIB = 1024**2
PID, OTHER = 4321, 99
# CUDA sorts by speed and calls the H200 its number 0; NVML sorts by bus and calls the T4 that.
H200, T4 = "11111111-aaaa", "22222222-bbbb"


class NVMLError(Exception):
    """As pynvml.NVMLError."""


@dataclass
class Card:
    uuid: str
    name: str
    used: int = 600 * MIB
    total: int = 1000 * MIB
    reserved: int = 50 * MIB
    processes: dict[int, int | None] | None = field(default_factory=dict)
    instances: list["Card"] = field(default_factory=list)


@dataclass
class Driver:
    """The calls of pynvml that are used, on these cards."""

    cards: list[Card]
    has_driver: bool = True
    knows_v2: bool = True
    opened: int = 0

    NVMLError = NVMLError
    nvmlMemory_v2 = 2  # noqa: N815

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.has_driver:
            raise NVMLError("Library Not Found")
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        if not self.opened:
            raise NVMLError("Uninitialized")
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.159"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:  # noqa: N802
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:  # noqa: N802
        known = [*self.cards, *(i for card in self.cards for i in card.instances)]
        for card in known:
            if card.uuid == uuid:
                return card
        raise NVMLError("Not Found")

    def nvmlDeviceGetName(self, card: Card) -> str:  # noqa: N802
        return card.name

    def nvmlDeviceGetUUID(self, card: Card) -> str:  # noqa: N802
        return card.uuid

    def nvmlDeviceGetMemoryInfo(self, card: Card, version: int = 1) -> Any:  # noqa: N802
        if version == 2 and not self.knows_v2:
            raise NVMLError("Function Not Found")
        reserve = 0 if version == 2 else card.reserved
        return SimpleNamespace(used=card.used + reserve, total=card.total)

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> list[Any]:  # noqa: N802
        if card.processes is None:
            raise NVMLError("Not Supported")
        return [SimpleNamespace(pid=p, usedGpuMemory=b) for p, b in card.processes.items()]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:  # noqa: N802
        if not card.instances:
            raise NVMLError("Not Supported")
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, index: int) -> Card:  # noqa: N802
        if index >= len(card.instances):
            raise NVMLError("Not Found")
        return card.instances[index]


@pytest.fixture
def t4() -> Card:
    return Card(f"GPU-{T4}", "Tesla T4")


@pytest.fixture
def h200() -> Card:
    return Card(f"GPU-{H200}", "NVIDIA H200")


@pytest.fixture
def driver(t4: Card, h200: Card) -> Driver:
    return Driver([t4, h200])


def reader_of(
    driver: Driver, uuid: str, before: Mapping[str, nvml.DeviceUsage], held: int = 0
) -> nvml.GpuReader:
    return nvml.GpuReader(nvml.baseline(uuid, before, PID, held, driver), driver)


def started(driver: Driver, card: Card, own: int | None, **more: int) -> nvml.GpuReader:
    """Return a reader for a training that has its context: `own` bytes by the process list."""
    before = nvml.usage_by_uuid(driver)
    assert card.processes is not None
    card.processes[PID] = own
    card.used += own or more.get("context", 0)
    return reader_of(driver, card.uuid.partition("-")[2], before)


# Which card


def test_card_is_the_one_that_cuda_means_and_not_the_one_of_that_number(
    driver: Driver, h200: Card, t4: Card
) -> None:
    reader = started(driver, h200, 500 * MIB)
    t4.used = 999 * MIB
    assert reader.uuid == f"GPU-{H200}"
    assert reader.usage().used == h200.used
    assert reader.taken(reader.usage()) == 500 * MIB


def test_card_that_cannot_be_matched_is_an_error_that_names_it(driver: Driver) -> None:
    with pytest.raises(LookupError, match="33333333"):
        reader_of(driver, "33333333", {})


def test_instance_of_a_divided_card_is_found(driver: Driver, h200: Card) -> None:
    part = Card("MIG-44444444", "NVIDIA H200 MIG 1g.18gb", used=10 * MIB, total=100 * MIB)
    h200.instances.append(part)
    reader = started(driver, part, 50 * MIB)
    assert reader.uuid == "MIG-44444444"
    assert reader.total_bytes == 100 * MIB


def test_memory_in_use_is_told_for_cards_and_instances(driver: Driver, h200: Card) -> None:
    h200.instances.append(Card("MIG-44444444", "part", used=10 * MIB))
    used = {uuid: usage.used for uuid, usage in nvml.usage_by_uuid(driver).items()}
    assert used == {
        f"GPU-{T4}": 600 * MIB,
        f"GPU-{H200}": 600 * MIB,
        "MIG-44444444": 10 * MIB,
    }


def test_card_that_refuses_to_answer_is_passed_over(driver: Driver, h200: Card) -> None:
    class Private(Driver):
        def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:  # noqa: N802
            if index == 0:
                raise NVMLError("No Permission")
            return super().nvmlDeviceGetHandleByIndex(index)

    assert list(nvml.usage_by_uuid(Private(driver.cards))) == [h200.uuid]


# How much


def test_drivers_reserve_is_not_counted_as_used(driver: Driver, h200: Card) -> None:
    assert nvml.usage_by_uuid(driver)[h200.uuid].used == h200.used


def test_old_driver_that_refuses_the_new_call_is_read_by_the_old_one(
    driver: Driver, h200: Card
) -> None:
    driver.knows_v2 = False
    assert nvml.usage_by_uuid(driver)[h200.uuid].used == h200.used + h200.reserved
    reader = started(driver, h200, 500 * MIB)
    assert reader.taken(reader.usage()) == 500 * MIB


def test_process_figure_is_the_headline_where_there_is_one(driver: Driver, h200: Card) -> None:
    reader = started(driver, h200, 500 * MIB)
    assert h200.processes is not None
    h200.processes[PID], h200.used = 900 * MIB, h200.used + 420 * MIB
    assert reader.taken(reader.usage()) == 900 * MIB
    assert (reader.sees_process, reader.managed) == (True, False)


def test_without_a_process_figure_the_devices_rise_counts(driver: Driver, h200: Card) -> None:
    reader = started(driver, h200, None, context=500 * MIB)
    h200.used += 100 * MIB
    assert reader.taken(reader.usage()) == 600 * MIB
    assert not reader.sees_process


def test_without_a_process_list_the_devices_rise_counts(driver: Driver, h200: Card) -> None:
    before = nvml.usage_by_uuid(driver)
    h200.processes = None
    h200.used += 500 * MIB
    reader = reader_of(driver, H200, before)
    assert reader.taken(reader.usage()) == 500 * MIB


def test_what_another_process_took_meanwhile_is_not_ours(driver: Driver, h200: Card) -> None:
    assert h200.processes is not None
    h200.processes[OTHER] = 200 * MIB
    reader = started(driver, h200, None, context=500 * MIB)
    h200.processes[OTHER] = 500 * MIB
    h200.used += 300 * MIB
    assert reader.taken(reader.usage()) == 500 * MIB


def test_what_another_process_gave_back_does_not_hide_ours(driver: Driver, h200: Card) -> None:
    assert h200.processes is not None
    h200.processes[OTHER] = 200 * MIB
    reader = started(driver, h200, None, context=500 * MIB)
    del h200.processes[OTHER]
    h200.used += 100 * MIB - 200 * MIB
    assert reader.taken(reader.usage()) == 600 * MIB


def test_rise_is_never_negative(driver: Driver, h200: Card) -> None:
    reader = started(driver, h200, None)
    h200.used -= 100 * MIB
    assert reader.taken(reader.usage()) == 0


def test_managed_memory_that_the_process_figure_leaves_out_counts(
    driver: Driver, h200: Card
) -> None:
    reader = started(driver, h200, 500 * MIB)
    h200.used += 65 * MIB
    assert reader.taken(reader.usage()) == 565 * MIB
    assert reader.managed


def test_bookkeeping_of_the_driver_is_not_managed_memory(driver: Driver, h200: Card) -> None:
    reader = started(driver, h200, 500 * MIB)
    h200.used += 64 * MIB
    assert reader.taken(reader.usage()) == 500 * MIB
    assert not reader.managed


def test_growth_of_another_process_is_not_managed_memory(driver: Driver, h200: Card) -> None:
    reader = started(driver, h200, 500 * MIB)
    assert h200.processes is not None
    h200.processes[OTHER] = 300 * MIB
    h200.used += 300 * MIB
    assert reader.taken(reader.usage()) == 500 * MIB
    assert not reader.managed


def test_card_that_was_not_read_before_begins_without_ours(driver: Driver, h200: Card) -> None:
    assert h200.processes is not None
    h200.processes[PID] = 500 * MIB
    h200.used += 500 * MIB
    reader = reader_of(driver, H200, {})
    h200.used += 100 * MIB
    assert reader.taken(reader.usage()) == 600 * MIB


# Who we are, where the driver numbers processes otherwise than our own namespace does


def foreign(driver: Driver, card: Card, *new: int) -> nvml.GpuReader:
    """Return a reader for a training whose context the driver lists under another number."""
    before = nvml.usage_by_uuid(driver)
    assert card.processes is not None
    for pid in new:
        card.processes[pid] = 500 * MIB
        card.used += 500 * MIB
    return reader_of(driver, card.uuid.partition("-")[2], before)


@pytest.mark.parametrize("own", [1500 * MIB, None])
def test_what_a_script_held_before_its_training_is_its_own(
    driver: Driver, h200: Card, own: int | None
) -> None:
    h200.used += 1500 * MIB  # context and model
    h200.processes = {PID: own}
    reader = reader_of(driver, H200, {}, held=1000 * MIB)
    h200.processes, h200.used = {PID: own and own + 300 * MIB}, h200.used + 300 * MIB
    assert reader.taken(reader.usage()) == (1800 * MIB if own else 1300 * MIB)


def test_the_one_new_process_is_ours_under_whatever_number(driver: Driver, h200: Card) -> None:
    assert h200.processes is not None
    h200.processes[OTHER] = 200 * MIB
    reader = foreign(driver, h200, 700_001)
    h200.processes |= {700_001: 900 * MIB, OTHER: 300 * MIB}
    h200.used += 500 * MIB
    assert reader.taken(reader.usage()) == 900 * MIB
    assert (reader.sees_process, reader.warning) == (True, None)
    assert [other.pid for other in reader.other_processes()] == [OTHER]


@pytest.mark.parametrize("new", [(), (700_001, 700_002)])
def test_nothing_is_taken_off_where_it_is_unknown_who_we_are(
    driver: Driver, h200: Card, new: tuple[int, ...]
) -> None:
    assert h200.processes is not None
    h200.processes[OTHER] = 200 * MIB  # as with MPS, whose server stands for all
    reader = foreign(driver, h200, *new)
    h200.processes = {pid: (count or 0) + 300 * MIB for pid, count in h200.processes.items()}
    h200.used += 300 * MIB * len(h200.processes)
    assert reader.taken(reader.usage()) == (300 + 800 * len(new)) * MIB
    assert not reader.sees_process
    assert reader.warning
    assert "rise of the whole device" in reader.warning
    assert [other.pid for other in reader.other_processes()] == [OTHER]


def test_other_processes_on_the_card_are_named(driver: Driver, h200: Card) -> None:
    assert h200.processes is not None
    h200.processes |= {os.getpid(): 200 * MIB, 2**30: None}
    reader = started(driver, h200, 500 * MIB)
    ours, gone = reader.other_processes()
    assert (ours.pid, ours.bytes) == (os.getpid(), 200 * MIB)
    assert ours.name != "unknown"
    assert gone == nvml.GpuProcess(2**30, "unknown", None)


def test_process_that_comes_later_is_remembered_at_its_largest(driver: Driver, h200: Card) -> None:
    assert h200.processes is not None
    h200.processes[OTHER] = 200 * MIB
    reader = started(driver, h200, 500 * MIB)
    late = os.getpid()
    for count in (100 * MIB, 300 * MIB, None):
        h200.processes[late] = count
        reader.usage()
    del h200.processes[late], h200.processes[OTHER]
    reader.usage()
    [found] = reader.late_comers()
    assert (found.pid, found.bytes) == (late, 300 * MIB)
    assert found.name != "unknown"


# No driver


def test_machine_without_a_driver_has_no_gpus_and_no_version() -> None:
    absent = Driver([], has_driver=False)
    assert nvml.usable_gpus(absent) == []
    assert nvml.driver_version(absent) is None


def fail_inside(driver: Driver, seen: list[bool]) -> None:
    with nvml.session(driver) as available:
        seen.append(available)
        raise ValueError("the true error")


def test_session_without_a_driver_says_so_and_lets_errors_through() -> None:
    seen: list[bool] = []
    with pytest.raises(ValueError, match="the true error"):
        fail_inside(Driver([], has_driver=False), seen)
    assert seen == [False]


def test_session_is_closed_after_an_error(driver: Driver) -> None:
    seen: list[bool] = []
    with pytest.raises(ValueError, match="the true error"):
        fail_inside(driver, seen)
    assert (seen, driver.opened) == ([True], 0)


def test_driver_tells_its_version_and_gpus(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert nvml.driver_version(driver) == "580.159"
    assert nvml.usable_gpus(driver) == ["Tesla T4", "NVIDIA H200"]
    assert driver.opened == 0


@pytest.mark.parametrize("visible", ["", " ", "-1", "NoDevFiles"])
def test_hidden_gpus_are_not_usable(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvml.usable_gpus(driver) == []


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("1", ["NVIDIA H200"]),
        ("1, 0", ["NVIDIA H200", "Tesla T4"]),
        ("2", []),
        ("0,2,1", ["Tesla T4"]),
        ("0,-1,1", ["Tesla T4"]),
        ("1,1", []),
        (f"GPU-{H200}", ["NVIDIA H200"]),
        ("GPU-1111,GPU-22", ["NVIDIA H200", "Tesla T4"]),
        ("GPU-", []),
        ("GPU-33333333,0", []),
        ("MIG-4444", ["NVIDIA H200 MIG 1g.18gb"]),
    ],
)
def test_only_gpus_that_the_user_shows_are_usable(
    driver: Driver, h200: Card, monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[str]
) -> None:
    h200.instances.append(Card("MIG-44444444", "NVIDIA H200 MIG 1g.18gb"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvml.usable_gpus(driver) == expected
