//! vCPUs of the bare machine: 64-bit mode at once, and running until the program is done.

use std::io;
use std::sync::PoisonError;

use godwit_units::PAGE_SIZE;
use kvm_bindings::{KVM_EXIT_DIRTY_RING_FULL, KVM_MAX_CPUID_ENTRIES, kvm_regs};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use super::{BareMachine, CODE, CONTROL, Ram, TABLES, VIRTUAL, kvm_error, list_bytes, program};

const CR0_PROTECTED_PAGED: u64 = 1 | 1 << 4 | 1 << 16 | 1 << 31;
const CR4_PAE: u64 = 1 << 5;
/// Ports may be used without privilege.
const RFLAGS_PORTS: u64 = 0x3002;
/// Where the program writes when it is done.
const DONE_PORT: u16 = 0xf4;
const EFER_LONG: u64 = 1 << 8 | 1 << 10;

/// How a vCPU wanders over memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wander {
    /// The first page, counted through all blocks.
    pub first: u64,
    /// How many pages.
    pub pages: u64,
    /// Turns of an empty loop between two writes; 0 is full speed. (No `pause`: under a hypervisor that may be an exit.)
    pub idle: u64,
    /// Starts the random numbers.
    pub seed: u64,
}

/// Makes vCPU `number`, in 64-bit mode with the page tables of the machine.
pub(super) fn make(kvm: &Kvm, vm: &VmFd, number: usize) -> io::Result<VcpuFd> {
    let vcpu = vm.create_vcpu(number as u64).map_err(kvm_error)?;
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(kvm_error)?;
    vcpu.set_cpuid2(&cpuid).map_err(kvm_error)?;
    let mut sregs = vcpu.get_sregs().map_err(kvm_error)?;
    sregs.cr3 = TABLES;
    sregs.cr4 |= CR4_PAE;
    sregs.cr0 = CR0_PROTECTED_PAGED;
    sregs.efer = EFER_LONG;
    for (segment, kind) in [
        (&mut sregs.cs, 0xb),
        (&mut sregs.ds, 0x3),
        (&mut sregs.es, 0x3),
        (&mut sregs.fs, 0x3),
        (&mut sregs.gs, 0x3),
        (&mut sregs.ss, 0x3),
    ] {
        segment.base = 0;
        segment.limit = u32::MAX;
        segment.type_ = kind;
        segment.present = 1;
        segment.dpl = 3;
        segment.s = 1;
        segment.g = 1;
        segment.l = u8::from(kind == 0xb);
        segment.db = u8::from(kind != 0xb);
        segment.selector = if kind == 0xb { 0x1b } else { 0x23 };
    }
    vcpu.set_sregs(&sregs).map_err(kvm_error)?;
    Ok(vcpu)
}

impl BareMachine {
    /// Has vCPU `vcpu` write each of `pages` (counted through all blocks) once, and waits for that.
    ///
    /// # Errors
    /// When the guest leaves in any other way.
    pub fn touch(&self, vcpu: usize, pages: &[u32]) -> io::Result<()> {
        let total = self.blocks().iter().map(|block| block.pages().0).sum();
        let list = self.lists + vcpu as u64 * list_bytes(total);
        assert!(pages.len() as u64 <= total, "{} pages of {total} to touch", pages.len());
        let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
        self.control.write(list, &bytes)?;
        let registers = kvm_regs {
            rip: CODE + program::touch_offset(),
            rdi: VIRTUAL,
            rsi: pages.len() as u64,
            r9: self.writes(vcpu) + 1,
            r11: vcpu as u64 * 8,
            r12: list,
            rflags: RFLAGS_PORTS,
            ..Default::default()
        };
        self.run(vcpu, registers)?;
        self.control.store(control(vcpu), self.writes(vcpu) + pages.len() as u64 + 1);
        Ok(())
    }

    /// Has vCPU `vcpu` write random pages, and returns when it was told to [`BareMachine::halt`].
    ///
    /// # Errors
    /// When the guest leaves in any other way.
    pub fn wander(&self, vcpu: usize, how: Wander) -> io::Result<()> {
        let registers = kvm_regs {
            rip: CODE,
            rdi: VIRTUAL + how.first * PAGE_SIZE,
            rsi: how.pages,
            rbx: how.seed.max(1),
            r8: how.idle,
            r9: self.writes(vcpu),
            r10: control(vcpu),
            r11: vcpu as u64 * 8,
            rflags: RFLAGS_PORTS,
            ..Default::default()
        };
        self.run(vcpu, registers)
    }

    /// Stops wandering vCPUs, now and, until [`BareMachine::go`], those that begin to wander later.
    pub fn halt(&self) {
        (0..self.vcpus.len()).for_each(|vcpu| self.control.store(control(vcpu) + 8, 1));
    }

    /// Lets vCPUs wander again.
    pub fn go(&self) {
        (0..self.vcpus.len()).for_each(|vcpu| self.control.store(control(vcpu) + 8, 0));
    }

    /// How many writes vCPU `vcpu` has made.
    #[must_use]
    pub fn writes(&self, vcpu: usize) -> u64 {
        Ram::word(&self.control, control(vcpu))
    }

    fn run(&self, number: usize, registers: kvm_regs) -> io::Result<()> {
        let mut vcpu = self.vcpus[number].lock().unwrap_or_else(PoisonError::into_inner);
        vcpu.set_regs(&registers).map_err(kvm_error)?;
        loop {
            match vcpu.run() {
                Ok(VcpuExit::IoOut(DONE_PORT, _)) => break,
                Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => {
                    let room = self.rings.as_ref().map_or(Ok(()), |rings| rings.make_room(number));
                    room.map_err(io::Error::other)?;
                }
                Ok(exit) => return Err(io::Error::other(format!("the guest left by {exit:?}"))),
                Err(error) if error.errno() == libc::EINTR || error.errno() == libc::EAGAIN => {}
                Err(error) => return Err(kvm_error(error)),
            }
        }
        // The instruction is finished by the next KVM_RUN (api.rst, KVM_RUN, KVM_EXIT_IO), and new registers must not be
        // set before.
        vcpu.set_kvm_immediate_exit(1);
        let finished = vcpu.run().map(drop);
        vcpu.set_kvm_immediate_exit(0);
        match finished {
            Err(error) if error.errno() != libc::EINTR => Err(kvm_error(error)),
            _ => Ok(()),
        }
    }
}

fn control(vcpu: usize) -> u64 {
    CONTROL + vcpu as u64 * PAGE_SIZE
}
