//! Unit tests of `src/compiler.rs`.

use super::*;

#[test]
fn a_folder_without_nvrtc_is_named() {
    let folder = Path::new("/nowhere/at/all");
    let Err(Absent::NoNvrtc { searched }) = Compiler::find(Some(folder)) else {
        panic!("there is no such folder");
    };
    assert!(searched.contains("/nowhere/at/all/lib64"), "{searched}");
}

#[test]
fn a_driver_must_not_be_older_than_the_compiler() {
    let compiler = Compiler { version: (13, 0) };
    assert_eq!(compiler.check_driver((13, 2)), Ok(()));
    let error = compiler.check_driver((12, 9)).unwrap_err().to_string();
    assert!(error.contains("13.0") && error.contains("12.9"), "{error}");
}
