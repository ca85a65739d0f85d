"use strict";
(() => {
  const EVERY = 2000, PATIENCE = 10000, HEAD = 8192, LINES = 20;  // ms, ms, bytes, lines
  const $ = id => document.getElementById(id);
  const two = n => String(n).padStart(2, "0");
  const clock = d => [d.getHours(), d.getMinutes(), d.getSeconds()].map(two).join(":");
  const date = d => [d.getFullYear(), d.getMonth() + 1, d.getDate()].map(two).join("-");
  const address = f => "/results/" + encodeURIComponent(f.name);

  // All that comes from outside goes through here: as text, never as HTML.
  const put = (element, value) => {
    const text = typeof value === "number" ? value.toLocaleString("en") : String(value);
    if (element.textContent !== text) element.textContent = text;
  };
  const show = (element, yes) => { element.hidden = !yes; };
  const fill = (element, item) => {
    for (const e of [element, ...element.querySelectorAll("[data-k]")])
      if (e.dataset.k in item) put(e, item[e.dataset.k]);
    for (const e of element.querySelectorAll("[data-some]")) show(e, item[e.dataset.some]);
    for (const e of element.querySelectorAll("[data-w]")) e.style.flexGrow = item[e.dataset.w];
  };

  // Make the children of an element those of a list, in its order; known ones stay what they are.
  const sync = (id, items, key, more) => {
    const box = $(id), old = new Map([...box.children].map(e => [e.dataset.key, e]));
    items.forEach((item, i) => {
      const name = String(key(item));
      const e = old.get(name) || $("t-" + id).content.firstElementChild.cloneNode(true);
      old.delete(name);
      e.dataset.key = name;
      fill(e, item);
      if (more) more(e, item);
      if (box.children[i] !== e) box.insertBefore(e, box.children[i] || null);
    });
    old.forEach(e => e.remove());
  };

  const time = (element, seconds) => {
    const d = new Date(seconds * 1000), today = date(d) === date(new Date());
    element.dateTime = d.toISOString();
    put(element, (today ? "" : date(d) + " ") + clock(d));
  };

  // A new picture takes the old one's place when it is here, so that nothing flickers.
  const picture = (figure, f) => {
    const img = figure.querySelector("img"), src = address(f) + "?v=" + f.mtime;
    figure.querySelector("a").href = address(f);
    if (img.getAttribute("src") === src || img.dataset.next === src) return;
    img.dataset.next = src;
    const next = new Image();
    next.onload = () => { if (img.dataset.next === src) img.src = src; };
    next.onerror = () => { if (img.dataset.next === src) img.dataset.next = ""; };
    next.src = src;
    img.alt = "picture of the results: " + f.name;
    if (!img.hasAttribute("src")) img.src = src;
  };

  const preview = async (figure, f) => {
    const pre = figure.querySelector("pre"), version = String(f.mtime);
    figure.querySelector("a").href = address(f);
    pre.setAttribute("aria-label", "beginning of " + f.name);
    if (figure.dataset.version === version) return;
    figure.dataset.version = version;
    try {
      const answer = await fetch(address(f) + "?v=" + version,
        { headers: { Range: "bytes=0-" + (HEAD - 1) } });
      if (!answer.ok) throw new Error(answer.status);
      const lines = (await answer.text()).slice(0, HEAD).trimEnd().split("\n");
      const cut = lines.length > LINES || f.nbytes > HEAD;
      put(pre, lines.slice(0, LINES).join("\n") + (cut ? "\n\u2026" : ""));
    } catch (error) {
      figure.dataset.version = "";
    }
  };

  const draw = s => {
    document.title = s.name + ": " + s.state.text;
    put($("name"), s.name);
    put($("address"), s.url);
    $("state").dataset.word = s.state.word;
    put($("state-text"), s.state.text);
    const wrong = s.troubles.length + s.problems.length;
    show($("alarm"), wrong);
    put($("alarm-text"), wrong + (wrong === 1 ? " problem" : " problems"));
    sync("apps", s.apps, a => a.name);
    const is = suffix => f => f.name.endsWith(suffix);
    show($("results"), s.files.length);
    sync("pictures", s.files.filter(is(".png")), f => f.name, picture);
    sync("texts", s.files.filter(f => is(".txt")(f) && f.nbytes), f => f.name, preview);
    sync("files", s.files.filter(f => !is(".png")(f) && !(is(".txt")(f) && f.nbytes)),
      f => f.name, (e, f) => { e.querySelector("a").href = address(f); });
    for (const e of document.querySelectorAll("[data-line]")) put(e, s.lines[e.dataset.line]);
    show($("only-here"), s.only_here);
    show($("more-addresses"), s.urls.length > 1);
    put($("addresses"), s.urls.slice(1).join(", "));
    for (const key of ["url", "create", "attach"])
      if (s.boinc && $("boinc-" + key)) put($("boinc-" + key), s.boinc[key]);
    put($("n-active"), s.hosts.active);
    put($("n-hosts"), s.hosts.total);
    put($("n-users"), s.hosts.users);
    put($("n-listed"), s.hosts.recent.length);
    for (const h of s.hosts.recent)
      h.points = h.credit.toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
    sync("hosts", s.hosts.recent, h => h.id, (e, h) => {
      e.dataset.active = h.active;
      const link = (which, href) => { for (const a of e.querySelectorAll(which)) a.href = href; };
      link("a[data-k=volunteer]", "/show_user.php?userid=" + h.userid);
      link("a[data-k=name]", "/show_host_detail.php?hostid=" + h.id);
      link("a[data-why]", "/why/computer-" + h.id);
    });
    show($("nobody"), !s.hosts.recent.length);
    show($("troubles"), wrong);
    sync("problem-list", s.problems.map(text => ({ text })), p => p.text);
    sync("list", s.troubles, t => t.time + " " + t.text, (e, t) => time(e.querySelector("time"), t.time));
    time($("as-of"), s.server_time);
  };

  let failing = null, timer = 0, busy = false;  // failing: since when and how
  const complain = (how, why) => {
    if (!failing || failing.how !== how) failing = { how, since: clock(new Date()) };
    put($("silence"), how + " since " + failing.since + (why ? ": " + why : ""));
    show($("silence"), true);
    document.body.classList.add("silent");
  };
  const look = async () => {
    clearTimeout(timer);
    if (busy || document.hidden) return;
    busy = true;
    const patience = new AbortController();
    const bell = setTimeout(() => patience.abort(), PATIENCE);
    let answer = null, report = null;
    try {
      answer = await fetch("/status.json", { cache: "no-store", signal: patience.signal });
      report = await answer.json();
    } catch (error) {
      report = null;
    }
    clearTimeout(bell);
    if (answer && answer.ok && report) {
      failing = null;
      show($("silence"), false);
      document.body.classList.remove("silent");
      draw(report);
    } else if (answer) {
      complain("the server has a problem on its side", report ? report.error : "");
    } else {
      complain("the server does not answer", "");
    }
    busy = false;
    if (!document.hidden) timer = setTimeout(look, EVERY);
  };

  // navigator.clipboard is missing where the page came by plain http, that is, in most class rooms.
  const copy = async button => {
    const source = $(button.dataset.copy);
    let done = false;
    try {
      await navigator.clipboard.writeText(source.textContent);
      done = true;
    } catch (error) {
      getSelection().selectAllChildren(source);
      done = document.execCommand("copy");
    }
    put(button, done ? "Copied" : "Press Ctrl+C");
    setTimeout(() => put(button, "Copy"), 2000);
  };
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.hidden = false;
    const titles = $(button.dataset.copy).getAttribute("aria-labelledby") || button.dataset.copy + "-title";
    button.setAttribute("aria-label",
      "Copy: " + titles.split(" ").map(id => $(id).textContent).join(", "));
    button.addEventListener("click", () => copy(button));
  }
  // All systems are open where no script runs, for the page then loads itself again; else one's own.
  const mine = document.querySelector("[data-mine]");
  if (mine) for (const e of document.querySelectorAll(".system")) e.open = e === mine;
  document.addEventListener("visibilitychange", look);
  look();
})();
