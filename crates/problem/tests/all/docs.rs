//! The pages of `docs/` link to each other, on GitHub and in rustdoc; those of the CUDA kernels keep their widths.

use std::fs;
use std::path::Path;

#[test]
fn pages_link_to_each_other() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |path: &str| fs::read_to_string(root.join(path)).expect(path);
    let (readme, rustdoc) = (read("README.md"), read("docs/assets/links.md"));
    let has_module = |page: &str| rustdoc.contains(&format!("\n[{page}]: etalon_problem::"));
    for entry in fs::read_dir(root.join("docs")).expect("docs") {
        let name = entry.expect("an entry").file_name().into_string().expect("a name");
        if !name.ends_with(".md") {
            continue;
        }
        assert!(readme.contains(&format!("](docs/{name})")), "README.md does not link {name}");
        assert!(has_module(&name), "docs/assets/links.md lacks {name}");
        let page = read(&format!("docs/{name}"));
        assert!(page.contains("\n[README.md]: ../README.md\n"), "{name} does not link README.md");
        let definitions = page.lines().filter_map(|line| line.strip_prefix('[')?.split_once("]: "));
        for (label, path) in definitions {
            assert!(has_module(label), "{name} links {label}, which docs/assets/links.md lacks");
            assert!(root.join("docs").join(path).is_file(), "{name}: {path} does not exist");
        }
        let links = page.split('[').filter_map(|text| Some(text.split_once(']')?.0));
        for label in links.filter(|text| text.ends_with(".md")) {
            let definition = format!("\n[{label}]: ");
            assert!(page.contains(&definition), "{name} does not define [{label}]");
        }
    }
}

#[test]
fn pages_of_the_cuda_kernels_are_narrow_and_that_for_users_is_short() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for name in ["gpu.md", "gpu_tuning.md", "gpu_results.md"] {
        let page = fs::read_to_string(root.join("docs").join(name)).expect(name);
        // Rows of a recording are as wide as its figures.
        let is_prose = |line: &&str| name != "gpu_results.md" || !line.starts_with('|');
        let wide = page.lines().filter(is_prose).find(|line| line.chars().count() >= 120);
        assert_eq!(wide, None, "{name} has a line of 120 columns or more");
        // Some minutes of reading.
        assert!(name != "gpu.md" || page.lines().count() <= 250, "{name} has more than 250 lines");
    }
}
