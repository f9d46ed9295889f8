//! vCPUs of the bare machine: 64-bit mode at once, and running until the program is done.

use std::io;
use std::sync::PoisonError;

use godwit_units::PAGE_SIZE;
use kvm_bindings::{KVM_EXIT_DIRTY_RING_FULL, KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_sregs};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use super::{BareMachine, CODE, CONTROL, Ram, TABLES, VIRTUAL, kvm_error, list_bytes, program};

const CR0_PROTECTED_PAGED: u64 = 1 | 1 << 4 | 1 << 16 | 1 << 31;
const CR4_PAE: u64 = 1 << 5;
/// Ports may be used without privilege.
const RFLAGS_PORTS: u64 = 0x3002;
/// Where the program writes when it is done.
const DONE_PORT: u16 = 0xf4;
const EFER_LONG: u64 = 1 << 8 | 1 << 10;
/// Where the stores of a burst are, behind the other programs.
const BURST: u64 = CODE + PAGE_SIZE;
/// So often a ring is found full at one and the same instruction before the guest counts as stuck.
const STUCK: u32 = 1000;

/// How a vCPU wanders over memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wander {
    /// The first page, counted through all blocks.
    pub first: u64,
    /// How many pages.
    pub pages: u64,
    /// Turns of an empty loop between two writes; 0 is full speed. (No `pause`: under a hypervisor
    /// that may be an exit.)
    pub idle: u64,
    /// Pages of the window that is written at a time; 0 is all of them.
    pub window: u64,
    /// Writes until the window moves on.
    pub dwell: u64,
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

    /// Has vCPU `vcpu` write `pages` pages from `first` on (counted through all blocks), one
    /// instruction each and with privilege, and waits for that. A KVM that emulates code with
    /// privilege does so for many instructions at a time: this is how a ring is overrun there.
    /// Afterwards the vCPU is without privilege again.
    ///
    /// # Errors
    /// When the guest leaves in any other way.
    pub fn burst(&self, vcpu: usize, first: u64, pages: u32) -> io::Result<()> {
        let mut code = Vec::new();
        for page in 0..pages {
            // mov [rdi + page * 4096], r9
            code.extend([0x4c, 0x89, 0x8f]);
            code.extend((page * PAGE_SIZE as u32).to_le_bytes());
        }
        // out DONE_PORT, al
        code.extend([0xe6, DONE_PORT as u8]);
        let end = BURST + code.len() as u64;
        assert!(end <= CONTROL, "no room for the code of {pages} stores");
        self.control.write(BURST, &code)?;
        let registers = kvm_regs {
            rip: BURST,
            rdi: VIRTUAL + first * PAGE_SIZE,
            r9: self.writes(vcpu) + 1,
            rflags: RFLAGS_PORTS,
            ..Default::default()
        };
        self.set_privilege(vcpu, 0)?;
        let run = self.run(vcpu, registers);
        self.control.store(control(vcpu), self.writes(vcpu) + u64::from(pages));
        run.and(self.set_privilege(vcpu, 3))
    }

    fn set_privilege(&self, vcpu: usize, level: u8) -> io::Result<()> {
        let fd = self.vcpus[vcpu].lock().unwrap_or_else(PoisonError::into_inner);
        let mut sregs = fd.get_sregs().map_err(kvm_error)?;
        let kvm_sregs { cs, ds, es, fs, gs, ss, .. } = &mut sregs;
        for segment in [cs, ds, es, fs, gs, ss] {
            segment.dpl = level;
            segment.selector = segment.selector & !3 | u16::from(level);
        }
        fd.set_sregs(&sregs).map_err(kvm_error)
    }

    /// Has vCPU `vcpu` write random pages, and returns when it was told to [`BareMachine::halt`].
    ///
    /// # Errors
    /// When the guest leaves in any other way.
    pub fn wander(&self, vcpu: usize, how: Wander) -> io::Result<()> {
        let registers = kvm_regs {
            rip: CODE,
            rdi: VIRTUAL + how.first * PAGE_SIZE,
            rsi: if how.window == 0 { how.pages } else { how.window },
            r12: how.dwell,
            r14: how.pages,
            r15: how.dwell,
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
        let (mut full_at, mut times) = (kvm_regs::default(), 0);
        loop {
            match vcpu.run() {
                Ok(VcpuExit::IoOut(DONE_PORT, _)) => break,
                Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => {
                    if let Some(rings) = &self.rings {
                        // An error is the tracker's to tell; the guest runs on.
                        let _ = rings.make_room(number);
                    }
                    let at = vcpu.get_regs().map_err(kvm_error)?;
                    times = if at == full_at { times + 1 } else { 0 };
                    full_at = at;
                    if times > STUCK {
                        return Err(io::Error::other("the ring is full for ever"));
                    }
                }
                Ok(exit) => return Err(io::Error::other(format!("the guest left by {exit:?}"))),
                Err(error) if error.errno() == libc::EINTR || error.errno() == libc::EAGAIN => {}
                Err(error) => return Err(kvm_error(error)),
            }
        }
        // The instruction is finished by the next KVM_RUN (api.rst, KVM_RUN, KVM_EXIT_IO), and new
        // registers must not be set before.
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
