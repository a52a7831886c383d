//! Every way in which driver, device and compiler can be absent or fail, with libraries that do so on
//! demand: each is an error that names what failed, nothing panics, and after a fault that ends the context
//! every call says so.
#![cfg(target_os = "linux")]

mod archive;
mod enqueue;
mod fake;
mod plan;
mod session;

use etalon_cuda::kernels::{Compiler, Unit, peak_gflops};
use etalon_cuda::{Absent, Cache, DeviceId, Options, Settings, Workspace, probe};
use etalon_problem::{Dtype, Error, Pass};
use fake::{Case, Fake, Part, alone, each};
use session::{OnDevice, host_pass, session};

const OUT_OF_MEMORY: i32 = 2;
const INVALID_DEVICE: i32 = 101;
const UNKNOWN: i32 = 999;
const LAUNCH_FAILED: i32 = 719;

fn refusal<T>(result: Result<T, Error>) -> String {
    match result {
        Ok(_) => panic!("nothing was refused"),
        Err(error) => error.to_string(),
    }
}

/// A machine's reason not to be used, which `probe` and a workspace must agree on.
fn absent_on(fake: &Fake) -> Absent {
    let absent = probe().unwrap_err();
    // Of a device whose compiler is missing the error says what it is.
    let what = match absent {
        Absent::NoNvrtc { .. } | Absent::Nvrtc(_) | Absent::OldNvrtc { .. } | Absent::NewNvrtc { .. } => {
            "the tier cuda on sm_90"
        }
        _ => "the tier cuda",
    };
    let expected = Error::Unsupported { what: what.to_string(), reason: absent.to_string() };
    assert_eq!(Workspace::new().check(0), Err(expected));
    fake.fail(Part::Driver, "", 0, 0);
    absent
}

#[test]
fn a_driver_without_a_device() {
    alone("a_driver_without_a_device", |fake| {
        fake.set(Part::Driver, "devices", 0);
        assert_eq!(absent_on(fake), Absent::NoDevice);
    });
}

#[test]
fn a_driver_that_does_not_start() {
    // No device, the stub of a toolkit, another version than the kernel's module, a device in use.
    let cases = ["100", "34", "803", "46", "999"].map(Case::new);
    each("a_driver_that_does_not_start", &cases, |fake, case| {
        fake.fail(Part::Driver, "cuInit", 1, case.parse().unwrap());
        let expected = match case {
            "100" => Absent::NoDevice,
            "34" => Absent::Driver("CUDA_ERROR_STUB_LIBRARY".to_string()),
            "803" => Absent::Driver("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH".to_string()),
            "46" => Absent::Driver("CUDA_ERROR_DEVICE_UNAVAILABLE".to_string()),
            _ => Absent::Driver("CUDA_ERROR_UNKNOWN".to_string()),
        };
        assert_eq!(absent_on(fake), expected);
    });
}

#[test]
fn an_old_driver() {
    alone("an_old_driver", |fake| {
        fake.set(Part::Driver, "version", 11080);
        assert_eq!(absent_on(fake), Absent::OldDriver { found: "11.8".to_string() });
    });
}

#[test]
fn a_driver_that_is_older_than_the_compiler() {
    alone("a_driver_that_is_older_than_the_compiler", |fake| {
        fake.set(Part::Driver, "version", 12040);
        let (nvrtc, driver) = ("13.0".to_string(), "12.4".to_string());
        assert_eq!(absent_on(fake), Absent::NewNvrtc { nvrtc, driver });
    });
}

#[test]
fn functions_that_a_library_lacks() {
    let test = "functions_that_a_library_lacks";
    let of = |part: Part| {
        let lacks = move |name| Case { lacks: Some(part), ..Case::new(name) };
        part.functions().into_iter().map(lacks)
    };
    let cases: Vec<_> = of(Part::Driver).chain(of(Part::Nvrtc)).collect();
    assert!(cases.len() > 30, "{cases:?}");
    each(test, &cases, |fake, function| {
        let expected = format!("it lacks the function {function}");
        // Functions that only timing needs.
        if function.starts_with("cuEvent") {
            let timed = peak_gflops(&Workspace::new(), 0, Unit::Ffma, Dtype::F32);
            assert!(refusal(timed).contains(&expected));
            return;
        }
        let absent = absent_on(fake);
        match absent {
            Absent::Driver(reason) | Absent::Nvrtc(reason) => assert_eq!(reason, expected),
            other => panic!("{other}"),
        }
    });
}

#[test]
fn an_old_device() {
    alone("an_old_device", |fake| {
        fake.set(Part::Driver, "capability", 75);
        let found = refusal(Workspace::new().check(0));
        assert!(found.contains("device 0") && found.contains("8.0") && found.contains("7.5"), "{found}");
    });
}

#[test]
fn a_device_that_is_not_there() {
    alone("a_device_that_is_not_there", |fake| {
        fake.set(Part::Driver, "devices", 2);
        let workspace = Workspace::new();
        workspace.check(1).unwrap();
        let found = refusal(workspace.check(2));
        assert!(found.contains("number of devices (2), found 2"), "{found}");
        // One that has gone since it was counted.
        fake.fail(Part::Driver, "cuDeviceGet", 1, INVALID_DEVICE);
        let found = refusal(workspace.check(0));
        assert_eq!(found, "device 0 failed: CUDA_ERROR_INVALID_DEVICE");
        workspace.check(0).unwrap();
    });
}

#[test]
fn a_device_by_its_uuid() {
    alone("a_device_by_its_uuid", |fake| {
        fake.set(Part::Driver, "devices", 2);
        let [first, second] = ["GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff", "GPU-e0e1e2e3-e4e5-e6e7-e8e9-eaebecedeeef"]
            .map(|text| text.parse::<DeviceId>().unwrap());
        let workspace = Workspace::new();
        workspace.check(second).unwrap();
        let contexts = |fake: &Fake, device: DeviceId| {
            fake.fail(Part::Driver, "cuDevicePrimaryCtxRetain", 0, 0);
            assert_eq!(workspace.uuid(device), workspace.uuid(workspace.uuid(device).unwrap()));
            fake.calls(Part::Driver)
        };
        // One device has one context, by either name.
        assert_eq!(contexts(fake, DeviceId::Ordinal(1)), 0);
        assert_eq!(workspace.uuid(1), Ok(second));
        assert_eq!(contexts(fake, first), 1);
        assert_eq!(contexts(fake, DeviceId::default()), 0);
        let options = Options { device: second, ..Options::default() };
        host_pass(&workspace, Pass::Forward, Dtype::F32, &options).unwrap();
        let unknown = "GPU-00000000-0000-0000-0000-000000000000";
        let found = refusal(workspace.check(unknown.parse::<DeviceId>().unwrap()));
        assert_eq!(found, format!("`device` must be one of {first}, {second}, found {unknown}"));
        fake.fail(Part::Driver, "cuDeviceGetUuid_v2", 2, UNKNOWN);
        let found = refusal(Workspace::new().check(second));
        assert_eq!(found, "device 1 failed: CUDA_ERROR_UNKNOWN");
    });
}

#[test]
fn no_compiler() {
    each("no_compiler", &[Case::without_nvrtc("alone")], |fake, _| {
        let settings = Settings { nvrtc: Some(fake.folder.clone()), ..Settings::default() };
        let found = refusal(Workspace::with(settings).check(0));
        let folder = fake.folder.display().to_string();
        for part in ["sm_90", "nvidia-cuda-nvrtc", &folder] {
            assert!(found.contains(part), "{part}: {found}");
        }
    });
}

#[test]
fn an_old_compiler() {
    alone("an_old_compiler", |fake| {
        fake.set(Part::Nvrtc, "major", 11);
        assert_eq!(absent_on(fake), Absent::OldNvrtc { found: "11.0".to_string() });
        fake.fail(Part::Nvrtc, "nvrtcVersion", 1, 2);
        let reason = "its version: NVRTC_ERROR_PROGRAM_CREATION_FAILURE".to_string();
        assert_eq!(Compiler::find(None), Err(Absent::Nvrtc(reason)));
    });
}

#[test]
fn a_compiler_that_fails() {
    alone("a_compiler_that_fails", |fake| {
        let forward = |workspace: &Workspace| host_pass(workspace, Pass::Forward, Dtype::F32, &Options::default());
        let workspace = Workspace::new();
        fake.fail(Part::Nvrtc, "nvrtcCompileProgram", 1, 6);
        let found = refusal(forward(&workspace));
        for part in ["sm_90", "attention/portable", "NVRTC_ERROR_COMPILATION", "a message of the compiler"] {
            assert!(found.contains(part), "{part}: {found}");
        }
        // Whatever fails is named; without its log a source is compiled all the same.
        for function in Part::Nvrtc.functions() {
            fake.fail(Part::Nvrtc, "", 0, 0);
            let workspace = Workspace::new();
            workspace.check(0).unwrap();
            fake.fail(Part::Nvrtc, function, 1, 11);
            let result = forward(&workspace);
            match function {
                "nvrtcVersion" | "nvrtcDestroyProgram" => result.unwrap(),
                "nvrtcGetProgramLog" | "nvrtcGetProgramLogSize" => result.unwrap(),
                _ => {
                    let found = refusal(result);
                    assert!(found.contains("NVRTC_ERROR_INTERNAL_ERROR"), "{function}: {found}");
                    // Nothing half is kept.
                    forward(&workspace).unwrap();
                }
            }
        }
        for size in [0, 3] {
            fake.set(Part::Nvrtc, "size", size);
            let found = refusal(forward(&Workspace::new()));
            assert!(found.contains(&format!("{size} bytes that are no machine code")), "{found}");
        }
    });
}

#[test]
fn a_file_in_the_place_of_the_cache() {
    alone("a_file_in_the_place_of_the_cache", |fake| {
        let file = fake.folder.join("cache");
        std::fs::write(&file, "no folder").unwrap();
        // Within the file there is no folder, either.
        for folder in [file.clone(), file.join("etalon")] {
            let cache = Some(Cache::new(folder, 1 << 20));
            let workspace = Workspace::with(Settings { cache, ..Settings::default() });
            host_pass(&workspace, Pass::Forward, Dtype::F32, &Options::default()).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "no folder");
    });
}

#[test]
fn nothing_is_kept_after_a_session() {
    alone("nothing_is_kept_after_a_session", |fake| {
        let on_device = OnDevice::new(fake, None);
        let before = fake.held();
        for pools in [1, 0] {
            fake.set(Part::Driver, "pools", pools);
            let workspace = Workspace::new();
            session(&workspace, &on_device).unwrap();
            assert!(fake.held() > before, "kernels and memory are kept between calls");
            drop(workspace);
            assert_eq!(fake.held(), before);
        }
    });
}

/// The calls of a session that fail, one in each session.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Failing {
    Each,
    /// The first and the last of each function.
    Ends,
}

/// Calls `body` for calls of the driver in a session, with the code of its failure and how the session ended. The
/// codes take turns.
fn each_failure(
    fake: &Fake,
    (failing, codes): (Failing, &[i32]),
    mut body: impl FnMut(&Workspace, &OnDevice, &str, i32, Result<(), Error>),
) {
    probe().unwrap();
    let on_device = OnDevice::new(fake, None);
    let mut functions = Part::Driver.functions();
    // Without pools of memory two functions are called in place of others.
    let without = ["cuMemAlloc_v2", "cuMemFree_v2"];
    let with: Vec<_> = if failing == Failing::Each { vec![""] } else { functions.clone() };
    let cases = with.into_iter().map(|name| (1, name)).chain(without.map(|name| (0, name)));
    for (pools, function) in cases {
        fake.set(Part::Driver, "pools", pools);
        fake.fail(Part::Driver, function, 0, 0);
        fake.set(Part::Driver, "current", 0);
        let workspace = Workspace::new();
        session(&workspace, &on_device).unwrap();
        let calls = fake.calls(Part::Driver);
        drop(workspace);
        assert!(calls > 10 || failing == Failing::Ends, "{function}: {calls}");
        for nth in (1..=calls).filter(|nth| failing == Failing::Each || [1, calls].contains(nth)) {
            let workspace = Workspace::new();
            fake.set(Part::Driver, "current", 0);
            let code = codes[nth % codes.len()];
            fake.fail(Part::Driver, function, nth, code);
            let result = session(&workspace, &on_device);
            let failed = fake.failed(Part::Driver);
            assert!(!failed.is_empty(), "a session makes the same calls each time");
            functions.retain(|name| *name != failed);
            fake.fail(Part::Driver, "", 0, 0);
            body(&workspace, &on_device, &failed, code, result);
            drop(workspace);
            fake.set(Part::Driver, "lost", 0);
        }
    }
    // Asked once in a process, and called when all is over.
    let others = ["cuDriverGetVersion", "cuDeviceGetCount"];
    let last = ["cuDevicePrimaryCtxRelease_v2", "cuStreamDestroy_v2", "cuModuleUnload"];
    functions.retain(|name| !others.contains(name) && !last.contains(name));
    assert!(functions.is_empty(), "no session calls {functions:?}");
}

#[test]
fn any_call_fails_once() {
    alone("any_call_fails_once", |fake| {
        each_failure(fake, (Failing::Each, &[OUT_OF_MEMORY, UNKNOWN]), |workspace, on_device, failed, code, result| {
            // A failure to give something back is reported by the next call.
            let error = result.and_then(|()| workspace.check(0)).unwrap_err();
            let text = error.to_string();
            let name = if code == UNKNOWN { "CUDA_ERROR_UNKNOWN" } else { "CUDA_ERROR_OUT_OF_MEMORY" };
            let memory = code == OUT_OF_MEMORY && matches!(error, Error::Memory { .. });
            assert!(text.contains(name) || memory, "{failed}: {text}");
            session(workspace, on_device).unwrap_or_else(|error| panic!("after {failed}: {error}"));
        });
    });
}

#[test]
fn a_fault_ends_the_context() {
    alone("a_fault_ends_the_context", |fake| {
        each_failure(fake, (Failing::Ends, &[LAUNCH_FAILED]), |workspace, on_device, failed, _, result| {
            let lost = |result: Result<(), Error>| match result {
                Err(Error::ContextLost { device: 0, fault }) => {
                    assert!(fault.contains("CUDA_ERROR_LAUNCH_FAILED"), "{fault}");
                }
                other => panic!("{failed}: {other:?}"),
            };
            lost(result.and_then(|()| workspace.check(0)));
            // Passes of this workspace, and those of one that comes later.
            for workspace in [workspace, &Workspace::new()] {
                lost(workspace.check(0));
                let options = Options::default();
                lost(host_pass(workspace, Pass::Forward, Dtype::F32, &options));
                lost(workspace.describe(0).map(|_| ()));
                lost(on_device.prepare(workspace).map(|_| ()));
            }
        });
    });
}

#[test]
fn a_prepared_pass_ends_with_its_context() {
    alone("a_prepared_pass_ends_with_its_context", |fake| {
        let on_device = OnDevice::new(fake, None);
        // Faults that a driver tells as such, wherever it notices them.
        for code in [214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911] {
            for function in ["cuLaunchKernel", "cuPointerGetAttribute", "cuCtxGetCurrent"] {
                let workspace = Workspace::new();
                let pass = on_device.prepare(&workspace).unwrap();
                // An address is looked up once.
                if function != "cuPointerGetAttribute" {
                    on_device.enqueue(&pass).unwrap();
                }
                fake.fail(Part::Driver, function, 1, code);
                for _ in 0..2 {
                    let found = on_device.enqueue(&pass);
                    assert!(matches!(found, Err(Error::ContextLost { device: 0, .. })), "{found:?}");
                }
                fake.set(Part::Driver, "lost", 0);
                // A lost context stays lost, whatever the driver says later.
                assert!(matches!(on_device.enqueue(&pass), Err(Error::ContextLost { .. })));
                assert!(matches!(workspace.check(0), Err(Error::ContextLost { .. })));
            }
        }
    });
}

/// Kernels and fills that every pass enqueues.
const LAUNCHES: &str = include_str!("launches.txt");

#[test]
fn what_is_enqueued_neither_waits_nor_allocates() {
    alone("what_is_enqueued_neither_waits_nor_allocates", |fake| {
        let found = enqueue::launches(fake);
        assert!(found == LAUNCHES, "launches.txt has other numbers than\n{found}");
    });
}

#[test]
fn the_gradient_of_a_bias_that_no_sequence_reads_is_filled() {
    alone("the_gradient_of_a_bias_that_no_sequence_reads_is_filled", |fake| {
        let mut passes = 0;
        enqueue::each_unread_bias(fake, |name, fills| {
            passes += 1;
            assert!(fills > 0, "{name} fills nothing");
        });
        assert!(passes > 0);
    });
}

#[test]
fn each_pass_is_timed() {
    alone("each_pass_is_timed", |_| session::each_pass_is_timed());
}

/// `cargo test --release -p etalon-cuda --test faults -- --ignored --nocapture` prints it.
#[test]
#[ignore = "a time, on which nothing is decided"]
fn what_the_crate_itself_takes_to_enqueue() {
    alone("what_the_crate_itself_takes_to_enqueue", |fake| println!("{}", enqueue::own_time(fake)));
}

#[test]
fn memory_grows_no_faster_than_the_number_of_tokens() {
    alone("memory_grows_no_faster_than_the_number_of_tokens", |_| {
        // Beyond what fills the memory for partial sums, which is the same for any length.
        let [small, large] = [1 << 14, 1 << 15].map(enqueue::bytes);
        for ((name, small), (_, large)) in small.iter().zip(&large) {
            for (what, small, large) in [("scratch memory", small[0], large[0]), ("tables", small[1], large[1])] {
                // Rooms are rounded up to 256 bytes, and there are few.
                assert!(large <= 2 * small + (1 << 14), "{name}: {what} of {small} and {large} bytes");
            }
        }
    });
}

#[test]
fn operands_on_two_devices() {
    alone("operands_on_two_devices", |fake| {
        fake.set(Part::Driver, "devices", 2);
        let workspace = Workspace::new();
        for name in ["q", "k", "v", "o", "lse", "scratch"] {
            let on_device = OnDevice::new(fake, Some(name));
            let pass = on_device.prepare(&workspace).unwrap();
            fake.fail(Part::Driver, "cuLaunchKernel", 0, 0);
            let found = refusal(on_device.enqueue(&pass));
            let expected = format!("`{name}` must be an address of device 0, found one of device 1");
            assert_eq!(found, expected);
            assert_eq!(fake.calls(Part::Driver), 0, "kernels were launched");
        }
    });
}
