//! Sources of kernels for compilers of the host.

use etalon_cuda::kernels::Variant;

/// The texts of these files of a module, with the kernel arguments that are defined in them.
pub fn files(variant: &Variant, names: &[&str]) -> String {
    let (mut kept, mut is_asked) = (String::new(), false);
    for line in variant.source().lines() {
        // As in `#line 1 "tile/types.cuh"`; arguments lie within a file.
        match line.strip_prefix("#line ").and_then(|rest| rest.split('"').nth(1)) {
            Some("arguments") => {}
            Some(name) => is_asked = names.contains(&name),
            None if is_asked => kept += &format!("{line}\n"),
            None => {}
        }
    }
    kept
}
