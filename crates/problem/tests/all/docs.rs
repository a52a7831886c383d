//! The pages of `docs/` link to each other, on GitHub and in rustdoc, and keep their widths.

use crate::files::root;
use std::fs;

#[test]
fn pages_link_to_each_other() {
    let root = root();
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

/// Lines of prose: neither rows of tables, which are as wide as their figures, nor code and formulas in fences.
fn prose(page: &str) -> impl Iterator<Item = &str> {
    let mut fenced = false;
    page.lines().filter(move |line| {
        let line = line.trim_start();
        let fence = line.starts_with("```");
        fenced ^= fence;
        !fenced && !fence && !line.starts_with('|')
    })
}

#[test]
fn pages_are_narrow_and_that_of_gpus_is_short() {
    let root = root();
    let docs = fs::read_dir(root.join("docs")).expect("docs");
    let pages = docs.map(|entry| entry.expect("an entry").path());
    let pages = pages.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let others = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "benches/peers/README.md"];
    for path in pages.chain(others.map(|name| root.join(name))) {
        let page = fs::read_to_string(&path).expect("a page");
        let wide = prose(&page).find(|line| line.chars().count() >= 120);
        assert_eq!(wide, None, "{} has a line of 120 columns or more", path.display());
    }
    // Tables of users and of tuning fit the page, too; the first is some minutes of reading.
    let read = |name: &str| fs::read_to_string(root.join("docs").join(name)).expect(name);
    for name in ["gpu.md", "gpu_tuning.md"] {
        let page = read(name);
        let wide = page.lines().find(|line| line.chars().count() >= 120);
        assert_eq!(wide, None, "{name} has a line of 120 columns or more");
    }
    assert!(read("gpu.md").lines().count() <= 270, "gpu.md has more than 270 lines");
}
