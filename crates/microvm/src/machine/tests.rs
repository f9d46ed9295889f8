//! A machine on the real KVM: what is saved is loaded, what does not fit is refused, and the guest
//! goes on.

use std::io::{self, Write};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};

use godwit_memory::RamBlock;
use godwit_stamp::heartbeat::Heartbeat;
use godwit_units::{ByteCount, PageIndex};

use super::*;
use crate::control::State;
use crate::{GuestMode, boot_block, plain_layout};

const LIMIT: Duration = Duration::from_secs(60);

#[derive(Clone, Default)]
struct Output(Arc<Mutex<Vec<u8>>>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Output {
    fn wait_for(&self, text: &str) -> String {
        let began = Instant::now();
        loop {
            let all = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
            if all.contains(text) {
                return all;
            }
            assert!(began.elapsed() < LIMIT, "{text:?} did not come: {all}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

struct Rig {
    machine: Machine,
    output: Output,
    events: Receiver<MachineEvent>,
}

fn plan(cpus: u32) -> MachinePlan {
    MachinePlan {
        blocks: plain_layout(ByteCount(32 << 20), None),
        slots: 7,
        cpus,
        disk: None,
        balloon: None,
        tracker: TrackerKind::KvmLog,
    }
}

/// A machine, or nothing where there is no KVM.
fn rig(test: &str, plan: &MachinePlan, mode: Option<GuestMode>) -> Option<Rig> {
    if let Err(error) = std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        let _ = writeln!(io::stderr(), "SKIPPED {test}: /dev/kvm cannot be opened: {error}");
        return None;
    }
    let guest = mode.map(|mode| GuestPlan {
        mode,
        rate: 500,
        fill: None,
        working_set: None,
        disk_on_ports: false,
        card_on_ports: None,
    });
    let (output, (events_in, events)) = (Output::default(), channel());
    let machine = Machine::new(plan, guest.as_ref(), Box::new(output.clone()), &events_in).unwrap();
    Some(Rig { machine, output, events })
}

fn copy_memory(from: &Machine, to: &Machine) {
    for (from, to) in from.ram().blocks().iter().zip(to.ram().blocks().iter()) {
        let copy = |from: &RamBlock, to: &RamBlock| {
            let mut bytes = vec![0; from.pages().bytes().0 as usize];
            from.read(PageIndex(0), &mut bytes).unwrap();
            to.write(PageIndex(0), &bytes).unwrap();
        };
        copy(from, to);
    }
}

#[test]
fn what_is_saved_is_loaded_and_the_guest_goes_on() {
    let name = "what_is_saved_is_loaded_and_the_guest_goes_on";
    let Some(source) = rig(name, &plan(2), Some(GuestMode::Rate)) else { return };
    source.machine.run();
    source.output.wait_for("HB n=2 ");
    source.machine.stop().unwrap();
    let state = source.machine.save().unwrap();
    let destination = rig(name, &plan(2), None).unwrap();
    copy_memory(&source.machine, &destination.machine);
    destination.machine.load(&state).unwrap();

    let again = destination.machine.save().unwrap();
    let (first, second) = (Blob::read(&state).unwrap(), Blob::read(&again).unwrap());
    use Tag::{CpuId, DebugRegs, Events, Lapic, MpState, Regs, Sregs, TscKhz, Xcrs, Xsave};
    for cpu in 0..2 {
        for tag in [CpuId, DebugRegs, Events, Lapic, MpState, Regs, Sregs, TscKhz, Xcrs, Xsave] {
            assert_eq!(first.section(tag, cpu), second.section(tag, cpu), "{tag:?} of vCPU {cpu}");
        }
    }
    assert_eq!(first.section(Tag::Serial, 0), second.section(Tag::Serial, 0));
    destination.machine.run();
    let printed = destination.output.wait_for("HB n=5 ");
    assert!(!printed.contains("BUG") && !printed.contains("GUEST READY"), "{printed}");
    assert!(printed.contains("bugs=0"), "{printed}");
}

#[test]
fn a_state_that_is_cut_or_of_another_machine_changes_nothing() {
    let name = "a_state_that_is_cut_or_of_another_machine_changes_nothing";
    let Some(source) = rig(name, &plan(1), Some(GuestMode::Idle)) else { return };
    let state = source.machine.save().unwrap();
    let destination = rig(name, &plan(1), None).unwrap();
    let before = destination.machine.save().unwrap();
    let mut other_version = state.clone();
    other_version[8] += 1;
    for wrong in [&state[..state.len() / 2], &state[..10], &other_version, b"QEVM and so on"] {
        assert!(matches!(destination.machine.load(wrong), Err(MicrovmError::State(_))));
    }
    let regs = |state: &[u8]| Blob::read(state).unwrap().section(Tag::Regs, 0).unwrap().to_vec();
    assert_eq!(regs(&destination.machine.save().unwrap()), regs(&before));

    let larger = rig(name, &plan(2), None).unwrap();
    let error = larger.machine.load(&state).unwrap_err().to_string();
    assert!(error.contains("the source has cpus 1, this machine has cpus 2"), "{error}");
}

#[test]
fn a_running_machine_neither_saves_nor_loads() {
    let name = "a_running_machine_neither_saves_nor_loads";
    let Some(rig) = rig(name, &plan(1), Some(GuestMode::Idle)) else { return };
    rig.machine.run();
    assert!(matches!(rig.machine.save(), Err(MicrovmError::WrongState { .. })));
    assert!(matches!(rig.machine.load(&[]), Err(MicrovmError::WrongState { .. })));
}

#[test]
fn a_guest_that_dies_is_told_with_its_place() {
    let name = "a_guest_that_dies_is_told_with_its_place";
    let Some(rig) = rig(name, &plan(1), Some(GuestMode::Crash)) else { return };
    rig.machine.run();
    let Ok(MachineEvent::Died(error)) = rig.events.recv_timeout(LIMIT) else { panic!("it lives") };
    let text = error.to_string();
    assert!(
        text.contains("vCPU 0 shut down by a triple fault") && text.contains("at 0x1"),
        "{text}"
    );
    // The machine can still be stopped and dropped.
    rig.machine.stop().unwrap();
}

#[test]
fn stopping_and_running_again_loses_nothing() {
    let name = "stopping_and_running_again_loses_nothing";
    let Some(rig) = rig(name, &plan(2), Some(GuestMode::Full)) else { return };
    rig.machine.run();
    rig.output.wait_for("HB n=1 ");
    for _ in 0..50 {
        rig.machine.stop().unwrap();
        let state = rig.machine.save().unwrap();
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(rig.machine.save().unwrap().len(), state.len());
        rig.machine.run();
    }
    let printed = rig.output.wait_for("HB n=8 ");
    assert!(!printed.contains("BUG"), "{printed}");
}

#[test]
fn machines_that_cannot_be_are_refused() {
    let name = "machines_that_cannot_be_are_refused";
    if rig(name, &plan(1), None).is_none() {
        return;
    }
    let refused = |plan: MachinePlan| {
        let events = channel().0;
        Machine::new(&plan, None, Box::new(io::sink()), &events).unwrap_err().to_string()
    };
    assert!(refused(plan(0)).contains("use 1 to"));
    assert!(refused(plan(33)).contains("33 vCPUs do not do"));
    let disk = Some("/nonexistent/image".into());
    assert!(refused(MachinePlan { disk, ..plan(1) }).contains("cannot be opened"));
    let blocks = plain_layout(ByteCount(1 << 30), None);
    let error = refused(MachinePlan { slots: 100_000, blocks, ..plan(1) });
    assert!(error.contains("use fewer --slots"), "{error}");
}

#[test]
fn a_machine_takes_as_many_slots_as_kvm_has() {
    let name = "a_machine_takes_as_many_slots_as_kvm_has";
    let plan =
        MachinePlan { slots: 32_764, blocks: plain_layout(ByteCount(256 << 20), None), ..plan(1) };
    let Some(rig) = rig(name, &plan, Some(GuestMode::Idle)) else { return };
    assert_eq!(rig.machine.slots().len(), 32_764);
    rig.machine.run();
    rig.output.wait_for("HB n=1 ");
}

#[test]
fn a_guest_that_writes_is_given_as_many_slots_as_kvm_has() {
    let name = "a_guest_that_writes_is_given_as_many_slots_as_kvm_has";
    let Some(rig) = rig(name, &plan(2), Some(GuestMode::Full)) else { return };
    rig.machine.run();
    rig.output.wait_for("HB n=2 ");
    let most = Kvm::new().unwrap().get_nr_memslots();
    let block = rig.machine.plug(ByteCount(144 << 20), most - rig.machine.slots().len()).unwrap();
    assert!(rig.machine.tell(&block));
    assert_eq!(rig.machine.slots().len(), most);
    let printed = rig.output.wait_for("PLUGGED pages=");
    assert!(!printed.contains("BUG"), "{printed}");
    let error = rig.machine.plug(ByteCount(1 << 20), 1).unwrap_err().to_string();
    assert!(error.contains("slots were asked for, but this KVM has"), "{error}");
}

#[test]
fn of_slots_that_kvm_refuses_in_part_none_stays() {
    let name = "of_slots_that_kvm_refuses_in_part_none_stays";
    let Some(rig) = rig(name, &plan(1), None) else { return };
    let ram = rig.machine.ram();
    let shown = rig.machine.slots().len();
    let more = layout::plugged(&ram.plans(), ByteCount(1 << 20)).unwrap();
    let memory = ram.with(&more).unwrap();
    let mut overlapping = memory.slots_of_last(3, 100);
    overlapping[2].gfn = overlapping[0].gfn;
    let refusal = slots::show(&rig.machine.vm, &overlapping, &memory).unwrap_err();
    assert!(!refusal.stuck);
    // KVM takes no slot of a number that it has in another size.
    slots::show(&rig.machine.vm, &memory.slots_of_last(2, 100), &memory).unwrap();
    // Where KVM has memory already, there is none for a plug. The numbers are free again after it.
    let plug = |machine: &Machine| machine.plug(ByteCount(1 << 20), 3).map(|block| block.gpa);
    let error = plug(&rig.machine).unwrap_err().to_string();
    assert!(error.contains("KVM_SET_USER_MEMORY_REGION failed"), "{error}");
    assert_eq!((rig.machine.slots().len(), ram.blocks().len()), (shown, 1));
    assert_eq!(rig.machine.map.lock().unwrap().next as usize, shown);
}

#[test]
fn a_guest_whose_list_makes_no_sense_is_given_memory_all_the_same() {
    use godwit_control::client;
    // Regression: a count of 2^64 - 1 was multiplied, and ended the conversation with the machine
    // in the state `plugging`; a table outside of memory was told as if nothing had changed.
    let name = "a_guest_whose_list_makes_no_sense_is_given_memory_all_the_same";
    let more = ByteCount(1 << 20);
    let spoiled: [(u64, u64); 4] = [
        (boot_block::PLUGGED, u64::MAX),
        (boot_block::PLUGGED, 1 << 60),
        (boot_block::PLUGGED, boot_block::MAX_PLUGGED as u64),
        (boot_block::PAGE_TABLES, !0xfff),
    ];
    for (number, (address, value)) in spoiled.into_iter().enumerate() {
        let Some(rig) = rig(name, &plan(1), Some(GuestMode::Idle)) else { return };
        let machine = Arc::new(rig.machine);
        let path =
            std::env::temp_dir().join(format!("godwit-list-{}-{number}", std::process::id()));
        let events = channel().0;
        let _socket = crate::control::serve(&machine, State::Here, &path, &events).unwrap();
        machine.ram().store(address, value).unwrap();

        let plugged = client::plug(&path, more, 1).unwrap();

        let warning = plugged.warning.expect("no warning");
        assert!(warning.contains("the guest does not know of it"), "{warning}");
        assert_eq!((&*plugged.block, plugged.slots), ("plugged0", 8));
        let status = client::status(&path).unwrap();
        assert_eq!((&*status.state, status.slots, status.ram.len()), ("paused", 8, 2));
        machine.ram().store(boot_block::PLUGGED, 0).unwrap();
        machine.ram().store(boot_block::PAGE_TABLES, 0).unwrap();
        assert_eq!(client::plug(&path, more, 1).unwrap().warning, None);
    }
}

#[test]
fn of_more_slots_than_there_can_be_none_is_made_up() {
    let name = "of_more_slots_than_there_can_be_none_is_made_up";
    let Some(rig) = rig(name, &plan(1), None) else { return };
    let error = rig.machine.plug(ByteCount(60 << 30), usize::MAX).unwrap_err().to_string();
    let wanted = (60 << 30) / 4096 + rig.machine.slots().len();
    assert!(error.starts_with(&format!("{wanted} memory slots were asked for")), "{error}");
}

/// How the guest fares for a while.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// For how much of the time its vCPUs ran.
    ran: f64,
    /// That, and the time in which they waited for a processor, since others are busy, too.
    at_most: f64,
    /// By its own count.
    writes_per_second: f64,
}

fn pace(rig: &Rig) -> Pace {
    // Times in nanoseconds, on a CPU and waiting for one (Documentation/scheduler/sched-stats.rst).
    let word = |tid: &i32, number: usize| {
        let text = std::fs::read_to_string(format!("/proc/self/task/{tid}/schedstat")).unwrap();
        text.split(' ').nth(number).unwrap().parse::<f64>().unwrap()
    };
    let threads = rig.machine.vcpu_threads();
    let sum = |number| threads.iter().map(|tid| word(tid, number)).sum::<f64>();
    let heartbeat = || -> Heartbeat {
        let printed = String::from_utf8(rig.output.0.lock().unwrap().clone()).unwrap();
        printed.lines().rev().find_map(|line| line.parse().ok()).unwrap()
    };
    let (began, ran, waited, before) = (Instant::now(), sum(0), sum(1), heartbeat());
    std::thread::sleep(Duration::from_millis(1500));
    let (ran, waited, after) = (sum(0) - ran, sum(1) - waited, heartbeat());
    let all = began.elapsed().as_nanos() as f64 * threads.len() as f64;
    let seconds = (after.t_ms - before.t_ms).max(1) as f64 / 1e3;
    let writes_per_second = (after.writes - before.writes) as f64 / seconds;
    Pace { ran: ran / all, at_most: (ran + waited) / all, writes_per_second }
}

#[test]
fn a_throttled_guest_works_less_and_then_runs_free() {
    let name = "a_throttled_guest_works_less_and_then_runs_free";
    let Some(rig) = rig(name, &plan(2), Some(GuestMode::Full)) else { return };
    rig.machine.run();
    rig.output.wait_for("HB n=2 ");
    let paces = [0.0, 0.5, 0.9, 0.0].map(|share| {
        rig.machine.throttle(share).unwrap();
        pace(&rig)
    });
    println!("{paces:.3?}");
    let [free, half, tenth, freed] = paces;
    // On a busy host a free guest does not run all of the time, waits for a processor included.
    assert!(free.at_most > 0.7 && freed.at_most > 0.7);
    assert!(half.at_most > 0.35 && half.ran < 0.6, "{half:?}");
    assert!(tenth.at_most > 0.05 && tenth.ran < 0.2, "{tenth:?}");
    assert!(tenth.writes_per_second < free.writes_per_second * 0.4);
    assert!(freed.writes_per_second > tenth.writes_per_second * 2.5);
    assert!(!rig.output.wait_for("HB n=2 ").contains("BUG"));
    assert!(rig.machine.throttle(1.0).is_err());
}

#[test]
fn under_a_throttle_the_guest_stops_runs_and_ends_as_always() {
    let name = "under_a_throttle_the_guest_stops_runs_and_ends_as_always";
    let Some(rig) = rig(name, &plan(2), Some(GuestMode::Full)) else { return };
    rig.machine.throttle(0.99).unwrap();
    rig.machine.run();
    rig.machine.throttle(0.9).unwrap();
    let mut stops = Vec::new();
    for number in 0..50 {
        std::thread::sleep(Duration::from_micros(3700 * (number % 4)));
        let began = Instant::now();
        rig.machine.stop().unwrap();
        stops.push(began.elapsed());
        let state = rig.machine.save().unwrap();
        std::thread::sleep(Duration::from_millis(1));
        // Held and freed by the throttle meanwhile, but stopped all the same.
        assert_eq!(regs(&rig.machine.save().unwrap()), regs(&state));
        rig.machine.run();
    }
    stops.sort_unstable();
    println!("stopped within {:?} (median), {:?} (most)", stops[25], stops[49]);
    // It need not wait for the end of a hold, which lasts 9 ms.
    assert!(stops[25] < Duration::from_millis(5), "{stops:?}");
    rig.machine.throttle(0.0).unwrap();
    let printed = rig.output.wait_for("HB n=8 ");
    assert!(!printed.contains("BUG"), "{printed}");
    // Dropped while its vCPUs are held.
    rig.machine.throttle(0.99).unwrap();
}

/// The registers of both vCPUs in a state.
fn regs(state: &[u8]) -> Vec<Vec<u8>> {
    let blob = Blob::read(state).unwrap();
    (0..2).map(|cpu| blob.section(Tag::Regs, cpu).unwrap().to_vec()).collect()
}

#[test]
fn a_source_that_goes_away_takes_its_throttle_along() {
    use godwit_engine::vm::{Brake, SourceVm};
    let name = "a_source_that_goes_away_takes_its_throttle_along";
    let Some(rig) = rig(name, &plan(1), Some(GuestMode::Full)) else { return };
    rig.machine.run();
    rig.output.wait_for("HB n=2 ");
    let mut source = crate::MicrovmSource::new(&rig.machine);
    source.throttle(0.9).unwrap();
    let slow = pace(&rig).ran;
    source.stop().unwrap();
    source.resume().unwrap();
    let resumed = pace(&rig).at_most;
    source.throttle(0.9).unwrap();
    assert_eq!(source.vcpus(), 1);
    assert!(source.vcpu_time().is_some_and(|time| time > Duration::ZERO));
    drop(source);
    let dropped = pace(&rig).at_most;
    println!("{slow:.3} {resumed:.3} {dropped:.3}");
    assert!(slow < 0.2 && resumed > 0.5 && dropped > 0.5, "{slow} {resumed} {dropped}");
}
