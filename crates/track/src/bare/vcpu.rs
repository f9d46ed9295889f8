//! vCPUs of the bare machine: 64-bit mode at once, and running until the program halts.

use std::io;
use std::sync::PoisonError;

use godwit_units::PAGE_SIZE;
use kvm_bindings::{KVM_EXIT_DIRTY_RING_FULL, KVM_MAX_CPUID_ENTRIES, kvm_regs};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use super::{BareMachine, CODE, CONTROL, Ram, TABLES, VIRTUAL, kvm_error, list_bytes, program};

const CR0_PROTECTED_PAGED: u64 = 1 | 1 << 4 | 1 << 16 | 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LONG: u64 = 1 << 8 | 1 << 10;

/// How a vCPU wanders over memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wander {
    /// The first page, counted through all blocks.
    pub first: u64,
    /// How many pages.
    pub pages: u64,
    /// `pause` instructions between two writes; 0 is full speed.
    pub pauses: u64,
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
        segment.dpl = 0;
        segment.s = 1;
        segment.g = 1;
        segment.l = u8::from(kind == 0xb);
        segment.db = u8::from(kind != 0xb);
        segment.selector = if kind == 0xb { 0x8 } else { 0x10 };
    }
    vcpu.set_sregs(&sregs).map_err(kvm_error)?;
    Ok(vcpu)
}

impl BareMachine {
    /// Has vCPU `vcpu` write each of `pages` (counted through all blocks) once, and waits for that.
    ///
    /// # Errors
    /// When the guest does anything but halt.
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
            rflags: 2,
            ..Default::default()
        };
        self.run(vcpu, registers)?;
        self.control.store(control(vcpu), self.writes(vcpu) + pages.len() as u64 + 1);
        Ok(())
    }

    /// Has vCPU `vcpu` write random pages, and returns when it was told to [`BareMachine::halt`].
    ///
    /// # Errors
    /// When the guest does anything but halt.
    pub fn wander(&self, vcpu: usize, how: Wander) -> io::Result<()> {
        let registers = kvm_regs {
            rip: CODE,
            rdi: VIRTUAL + how.first * PAGE_SIZE,
            rsi: how.pages,
            rbx: how.seed.max(1),
            r8: how.pauses,
            r9: self.writes(vcpu),
            r10: control(vcpu),
            r11: vcpu as u64 * 8,
            rflags: 2,
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

    fn run(&self, vcpu: usize, registers: kvm_regs) -> io::Result<()> {
        let mut vcpu = self.vcpus[vcpu].lock().unwrap_or_else(PoisonError::into_inner);
        vcpu.set_regs(&registers).map_err(kvm_error)?;
        loop {
            match vcpu.run() {
                Ok(VcpuExit::Hlt) => return Ok(()),
                Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => {
                    self.ring_full().map_err(io::Error::other)?;
                }
                Ok(exit) => return Err(io::Error::other(format!("the guest left by {exit:?}"))),
                Err(error) if error.errno() == libc::EINTR || error.errno() == libc::EAGAIN => {}
                Err(error) => return Err(kvm_error(error)),
            }
        }
    }
}

fn control(vcpu: usize) -> u64 {
    CONTROL + vcpu as u64 * PAGE_SIZE
}
