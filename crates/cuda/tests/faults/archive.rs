//! Kernels from an archive, on a machine with a driver alone and on one that has a compiler, too; kernels from
//! a cache.

use crate::fake::{Case, Fake, Part, alone, each};
use crate::refusal;
use crate::session::{OnDevice, host_pass, session};
use etalon_cuda::kernels::{ArchiveWriter, Compiler, Variant, every_variant};
use etalon_cuda::{Cache, Level, Options, Precision, Settings, Workspace};
use etalon_problem::{Dtype, Error, Pass};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

/// CUDA_ERROR_INVALID_IMAGE.
const INVALID_IMAGE: i32 = 200;

/// With an archive, and with no compiler but one that lies in an empty folder.
fn workspace(archive: &Path) -> Workspace {
    let nvrtc = Some(nowhere(archive));
    Workspace::with(Settings { archive: Some(archive.to_path_buf()), nvrtc, ..Settings::default() })
}

fn nowhere(archive: &Path) -> PathBuf {
    archive.with_file_name("nowhere")
}

fn forward(workspace: &Workspace) -> Result<(), Error> {
    host_pass(workspace, Pass::Forward, Dtype::F32, &Options::default())
}

/// An archive of every variant for devices of compute capability 9.0.
fn build(folder: &Path) {
    let writer = ArchiveWriter::new(folder, Compiler::find(None).unwrap()).unwrap();
    let add = |variant: &Variant| {
        let architecture = variant.family.architecture_on((9, 0)).unwrap();
        writer.add(variant, &architecture).unwrap()
    };
    let kernels = every_variant().iter().map(add).sum::<usize>();
    assert_eq!(kernels, every_variant().iter().map(|variant| variant.kernels().len()).sum::<usize>());
    assert_eq!(writer.finish().unwrap(), kernels);
}

#[test]
fn archived_kernels_need_no_compiler() {
    let cases = [Case::new("build"), Case::without_nvrtc("use")];
    each("archive::archived_kernels_need_no_compiler", &cases, |fake, case| {
        let archive = fake.shared.join("archive");
        if case == "build" {
            return build(&archive);
        }
        session(&workspace(&archive), &OnDevice::new(fake, None)).unwrap();
        refuses_what_is_not_there(fake, &archive);
    });
}

/// Checks that an error names the architecture, the package, and the folders that were searched.
fn refuses_what_is_not_there(fake: &Fake, archive: &Path) {
    let names = |found: &str, architecture: &str, more: &[&str]| {
        let folders = [archive, &nowhere(archive)].map(|folder| folder.display().to_string());
        let own = [architecture, "nvidia-cuda-nvrtc", &folders[0], &folders[1]];
        for part in own.iter().chain(more) {
            assert!(found.contains(part), "{part}: {found}");
        }
    };
    fake.set(Part::Driver, "capability", 80);
    let kernels = "kernels for sm_90, sm_90a";
    names(&refusal(forward(&workspace(archive))), "sm_80", &[kernels, "not among them"]);
    fake.set(Part::Driver, "capability", 90);
    // An archive of a newer compiler than the driver's.
    let index = archive.join("archive.txt");
    let lines = fs::read_to_string(&index).unwrap();
    fs::write(&index, lines.replace("nvrtc 13.0", "nvrtc 14.0")).unwrap();
    names(&refusal(forward(&workspace(archive))), "14.0", &["13.0"]);
    fs::write(&index, lines).unwrap();
    // Damaged entries.
    for path in entries(archive) {
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(path, bytes).unwrap();
    }
    names(&refusal(forward(&workspace(archive))), "sm_90", &["damaged"]);
    fs::remove_file(&index).unwrap();
    let found = refusal(forward(&workspace(archive)));
    assert!(found.contains(&archive.display().to_string()) && found.contains("archive.txt"), "{found}");
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|x| x == "kernel")).collect()
}

#[test]
fn an_image_that_the_driver_refuses_without_a_compiler() {
    let test = "archive::an_image_that_the_driver_refuses_without_a_compiler";
    let cases = [Case::new("build"), Case::without_nvrtc("use")];
    each(test, &cases, |fake, case| {
        let archive = fake.shared.join("archive");
        if case == "build" {
            let writer = ArchiveWriter::new(&archive, Compiler::find(None).unwrap()).unwrap();
            let variant = Variant::portable(Dtype::F32, 8, Some(8), false);
            // Code for sm_80 serves devices of 8.6.
            for (variant, architecture) in
                [(&variant, "sm_80"), (&Variant::moves(2), "sm_80"), (&Variant::moves(4), "sm_86")]
            {
                writer.add(variant, architecture).unwrap();
            }
            writer.finish().unwrap();
            return;
        }
        fake.set(Part::Driver, "capability", 86);
        let workspace = workspace(&archive);
        workspace.check(0).unwrap();
        fake.fail(Part::Driver, "cuModuleLoadData", 1, INVALID_IMAGE);
        assert_eq!(refusal(forward(&workspace)), "loading kernel forward failed: CUDA_ERROR_INVALID_IMAGE");
        forward(&workspace).unwrap();
    });
}

#[test]
fn an_archive_is_looked_up_first_and_the_compiler_last() {
    alone("archive::an_archive_is_looked_up_first_and_the_compiler_last", |fake| {
        let (archive, cache) = (fake.shared.join("archive"), fake.shared.join("cache"));
        let settings = Settings {
            archive: Some(archive.clone()),
            cache: Some(Cache::new(&cache, 1 << 20)),
            ..Settings::default()
        };
        let variant = Variant::portable(Dtype::F32, 8, Some(8), false);
        let writer = ArchiveWriter::new(&archive, Compiler::find(None).unwrap()).unwrap();
        assert_eq!(writer.add(&variant, "sm_90").unwrap(), variant.kernels().len());
        writer.finish().unwrap();
        // The second order is compiled and kept, what is archived is not; afterwards nothing is compiled.
        let compiled = || {
            fake.fail(Part::Nvrtc, "nvrtcCompileProgram", 0, 0);
            let workspace = Workspace::with(settings.clone());
            forward(&workspace).unwrap();
            let (second, options) = (Pass::DoubleBackward, Options::default());
            host_pass(&workspace, second, Dtype::F32, &options).unwrap();
            fake.calls(Part::Nvrtc)
        };
        let kernels = compiled();
        assert!(kernels > 0);
        assert_eq!(entries(&cache).len(), kernels);
        assert_eq!(compiled(), 0);
        // Kept code that the driver refuses is compiled again.
        for nth in 1..=2 {
            fake.fail(Part::Driver, "cuModuleLoadData", nth, INVALID_IMAGE);
            assert_eq!(compiled(), 1);
        }
        // An archive goes on where it ended; what is damaged is compiled again.
        let writer = ArchiveWriter::new(&archive, Compiler::find(None).unwrap()).unwrap();
        assert_eq!(writer.add(&variant, "sm_90").unwrap(), 0);
        fs::write(&entries(&archive)[0], "something else").unwrap();
        assert_eq!(writer.add(&variant, "sm_90").unwrap(), 1);
        assert_eq!(writer.finish().unwrap(), variant.kernels().len());
        fake.set(Part::Nvrtc, "major", 12);
        let newer = ArchiveWriter::new(&archive, Compiler::find(None).unwrap());
        let found = refusal(newer.map(|_| ()));
        assert!(found.contains("12.0") && found.contains("13.0"), "{found}");
    });
}

#[test]
fn threads_compile_a_kernel_once() {
    alone("archive::threads_compile_a_kernel_once", |fake| {
        let compiled = |threads: usize| {
            fake.fail(Part::Nvrtc, "nvrtcCompileProgram", 0, 0);
            let workspace = Workspace::with(Settings { cache: None, ..Settings::default() });
            let options = Options { level: Level::Sm80, precision: Precision::Flash, ..Options::default() };
            let pass = || host_pass(&workspace, Pass::Backward, Dtype::Bf16, &options).unwrap();
            thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(pass))));
            fake.calls(Part::Nvrtc)
        };
        let one = compiled(1);
        assert!(one > 1, "{one}");
        // Some orders of threads.
        for _ in 0..20 {
            assert_eq!(compiled(4), one);
        }
    });
}

#[test]
fn what_cannot_be_archived_is_named() {
    alone("archive::what_cannot_be_archived_is_named", |fake| {
        let (compiler, variant) = (Compiler::find(None).unwrap(), Variant::moves(2));
        let writer = ArchiveWriter::new(fake.shared.join("archive"), compiler).unwrap();
        fake.fail(Part::Nvrtc, "nvrtcCompileProgram", 1, 6);
        let found = refusal(writer.add(&variant, "sm_90"));
        for part in ["sm_90", "move WORD=2", "NVRTC_ERROR_COMPILATION", "a message of the compiler"] {
            assert!(found.contains(part), "{part}: {found}");
        }
        // A file in the place of the folder.
        let file = fake.shared.join("file");
        fs::write(&file, "").unwrap();
        let writer = ArchiveWriter::new(file.join("archive"), compiler);
        let found = refusal(writer.and_then(|writer| writer.add(&variant, "sm_90")));
        assert!(found.contains(&file.display().to_string()), "{found}");
    });
}
