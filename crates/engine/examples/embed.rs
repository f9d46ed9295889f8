//! A VMM with the engine inside, on a screen and a half: guest memory is vm-memory's, the "vCPU" is
//! a thread that counts in it, and the device state is where it stands. Two of them in one process,
//! and the guest moves from one to the other. docs/embedding.md goes through it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_engine::address::Listener;
use godwit_engine::handle::MigrationHandle;
use godwit_engine::vm::{DestinationVm, RunError, SourceVm, VmError};
use godwit_engine::{Cancel, destination, source};
use godwit_memory::RamBlock;
use godwit_track::{BlockMapping, DirtyTracker, PagemapTracker};
use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

const SIZE: usize = 16 << 20;

struct Vmm {
    memory: GuestMemoryMmap,
    ram: Arc<Vec<RamBlock>>,
    running: Arc<AtomicBool>,
    vcpu: Option<JoinHandle<u64>>,
    /// The state of the only device: how far the vCPU has counted.
    count: u64,
    /// Where the device state is written at the source, or read from at the destination.
    state: Option<UnixStream>,
}

impl Vmm {
    fn new() -> Result<Self, VmError> {
        let file = File::from(memfd_create("ram", MemfdFlags::CLOEXEC)?);
        file.set_len(SIZE as u64)?;
        let ranges = [(GuestAddress(0), SIZE, Some(FileOffset::new(file, 0)))];
        let memory = GuestMemoryMmap::from_ranges_with_files(ranges)?;
        let ram = RamBlock::of_guest_memory(&memory)?;
        Ok(Self { memory, ram, running: Arc::default(), vcpu: None, count: 0, state: None })
    }

    fn start(&mut self) {
        self.running.store(true, Ordering::SeqCst);
        let (memory, running, mut count) =
            (self.memory.clone(), Arc::clone(&self.running), self.count);
        self.vcpu = Some(std::thread::spawn(move || {
            while running.load(Ordering::SeqCst) {
                count += 1;
                let page = GuestAddress(count * 4096 % SIZE as u64);
                memory.write_obj(count, page).expect("it is memory");
                std::thread::sleep(Duration::from_micros(20));
            }
            count
        }));
    }
}

impl SourceVm for Vmm {
    fn machine(&self) -> &'static str {
        "example"
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        Arc::clone(&self.ram)
    }

    fn was_running(&self) -> bool {
        true
    }

    fn start_tracking(&mut self) -> Result<Arc<dyn DirtyTracker>, VmError> {
        let mappings = BlockMapping::of_guest_memory(&self.memory).ok_or("memory is not mapped")?;
        Ok(Arc::new(PagemapTracker::start_own(&mappings)?))
    }

    fn open_state(&mut self) -> Result<Box<dyn Read + Send>, VmError> {
        let (ours, theirs) = UnixStream::pair()?;
        self.state = Some(ours);
        Ok(Box::new(theirs))
    }

    fn stop(&mut self) -> Result<Instant, VmError> {
        self.running.store(false, Ordering::SeqCst);
        let vcpu = self.vcpu.take().ok_or("it does not run")?;
        self.count = vcpu.join().map_err(|_| "the vCPU has died")?;
        Ok(Instant::now())
    }

    fn release_state(&mut self) -> Result<(), VmError> {
        let mut state = self.state.take().ok_or("no state is wanted")?;
        Ok(state.write_all(&self.count.to_le_bytes())?)
    }

    fn state_saved(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), VmError> {
        self.state = None;
        if self.vcpu.is_none() {
            self.start();
        }
        Ok(())
    }

    fn retire(&mut self, _keep: bool) -> Result<(), VmError> {
        Ok(())
    }
}

impl DestinationVm for Vmm {
    fn machine(&self) -> &'static str {
        "example"
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        Arc::clone(&self.ram)
    }

    fn prepare(&mut self) -> Result<Box<dyn Write + Send>, VmError> {
        let (ours, theirs) = UnixStream::pair()?;
        self.state = Some(ours);
        Ok(Box::new(theirs))
    }

    fn finish_load(&mut self) -> Result<(), VmError> {
        let mut count = [0; 8];
        self.state.take().ok_or("it was not prepared")?.read_exact(&mut count)?;
        self.count = u64::from_le_bytes(count);
        Ok(())
    }

    fn run(&mut self) -> Result<(), RunError> {
        self.start();
        Ok(())
    }

    fn announce(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    fn discard(&mut self) -> Result<(), VmError> {
        self.running.store(false, Ordering::SeqCst);
        Ok(())
    }
}

pub(crate) fn main() -> Result<(), VmError> {
    let (mut from, mut to) = (Vmm::new()?, Vmm::new()?);
    from.start();
    std::thread::sleep(Duration::from_millis(100));
    let listener = Listener::bind(&"127.0.0.1:0".parse()?)?;
    let options = source::Options {
        verify: source::Verify::Live,
        ..source::Options::new(listener.address()?)
    };
    let receiving = std::thread::spawn(move || {
        let options = destination::Options::default();
        let received =
            destination::receive(&mut to, &listener, &options, &Cancel::default(), &mut |_| {});
        received.map(|_| to).map_err(|failure| failure.to_string())
    });
    let moved = source::migrate(&mut from, &options, &MigrationHandle::default(), &mut |_| {});
    let measures = moved.map_err(|failure| failure.to_string())?;
    let mut to = receiving.join().map_err(|_| "the destination has died")??;
    println!(
        "the guest moved in {} rounds, having counted to {}",
        measures.round_list.len(),
        from.count
    );

    // Every page holds what the guest wrote last to it, and it counts on.
    std::thread::sleep(std::time::Duration::from_millis(50));
    to.stop()?;
    let last: u64 = to.memory.read_obj(GuestAddress(to.count * 4096 % SIZE as u64))?;
    if to.count <= from.count || last != to.count {
        return Err(format!("it counted to {}, and memory holds {last}", to.count).into());
    }
    Ok(())
}
