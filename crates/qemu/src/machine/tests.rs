//! What stands against a migration, asked of a stand-in that answers as a QEMU with such devices would: most of them the
//! host of a test has not got.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A monitor that gives these answers, by command or command line, and empty ones else.
fn machine(answers: &[(&str, Value)]) -> Machine {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("godwit-stand-in-{}-{number}", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    let answers: HashMap<String, Value> =
        answers.iter().map(|(what, answer)| ((*what).to_owned(), answer.clone())).collect();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let greeting = json!({ "QMP": { "version": { "qemu": { "major": 10, "minor": 0, "micro": 2 } } } });
        writeln!(stream, "{greeting}").unwrap();
        for line in BufReader::new(stream.try_clone().unwrap()).lines() {
            let Ok(request) = line.map(|line| serde_json::from_str::<Value>(&line).unwrap()) else { return };
            let arguments = &request["arguments"];
            let what = [&arguments["command-line"], &arguments["path"], &request["execute"]];
            let what = what.into_iter().find_map(Value::as_str).unwrap();
            let answer = answers.get(what).cloned().unwrap_or(json!([]));
            writeln!(stream, "{}", json!({ "return": answer, "id": request["id"] })).unwrap();
        }
    });
    let machine = Machine::connect(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    machine
}

fn with_device(kind: &str) -> String {
    let children =
        json!([{ "name": "net1", "type": format!("child<{kind}>") }, { "name": "type", "type": "string" }]);
    let mut machine = machine(&[("/machine/peripheral", children)]);
    machine.check_source().map_or_else(|error| error.to_string(), |()| "fine".to_owned())
}

#[test]
fn devices_that_write_behind_the_page_tables_are_refused() {
    for kind in [
        "vfio-pci",
        "vfio-pci-nohotplug",
        "vhost-vdpa-device-pci",
        "vhost-scsi-pci",
        "scsi-generic",
        "scsi-block",
    ] {
        let told = with_device(kind);
        assert!(told.contains("writes guest memory behind the page tables"), "{kind}: {told}");
        assert!(told.contains(&format!("device 'net1' ({kind})")), "{told}");
    }
    for kind in ["virtio-net-pci", "scsi-hd", "vhost-vsock-pci"] {
        assert_eq!(with_device(kind), "fine", "{kind}");
    }
}

#[test]
fn back_ends_in_other_processes_are_refused() {
    for kind in ["vhost-user-blk-pci", "vhost-user-fs-pci", "vhost-user-device"] {
        assert!(with_device(kind).contains("is a vhost-user device"), "{kind}");
    }
    for line in [
        " \\ net0: index=0,type=vhost-user,vhost-user0 to unix:/run/x",
        " \\ net0: index=0,type=passt,vhost-user to unix:/tmp/passt_1.socket",
    ] {
        let mut machine = machine(&[("info network", json!(line))]);
        let told = machine.check_source().unwrap_err().to_string();
        assert!(told.contains("the network back end") && told.contains("vhost-user device"), "{told}");
    }
    let plain = json!(" \\ net0: index=0,type=user,net=10.0.2.0,restrict=off");
    machine(&[("info network", plain)]).check_source().unwrap();
}

#[test]
fn a_guest_that_runs_guests_under_kvm_is_refused() {
    let told = |kvm: bool, registers: &str| {
        let answers = [("query-kvm", json!({ "enabled": kvm })), ("info registers -a", json!(registers))];
        machine(&answers).check_nested().map_or_else(|error| error.to_string(), |()| "fine".to_owned())
    };
    let registers = |cr4: &str, efer: &str| {
        format!("CPU#0\r\nCR0=80050033 CR2=0 CR3=0000000002a0a000 CR4={cr4}\r\nEFER={efer}\r\n")
    };
    let (off, vmx) = (registers("000006f0", "0000000000000d01"), registers("000026f0", "0000000000000d01"));
    let svm = registers("000006f0", "0000000000001d01");
    assert_eq!(told(true, &off), "fine");
    assert!(told(true, &format!("{off}{vmx}")).contains("may run guests of its own (VMX is on)"));
    assert!(told(true, &svm).contains("SVM is on"));
    // TCG writes the memory of a guest's guests as it writes all memory.
    assert_eq!(told(false, &svm), "fine");
}

#[test]
fn work_on_the_images_is_refused() {
    let job = |status: &str| json!([{ "id": "backup0", "type": "backup", "status": status }]);
    let told =
        |status| machine(&[("query-jobs", job(status))]).check_source().map_err(|error| error.to_string());
    assert!(told("running").unwrap_err().contains("a block job ('backup0', backup) runs"));
    assert!(told("concluded").is_ok());
}
