"use strict";
for (const e of document.querySelectorAll("time")) {
  const d = new Date(e.dateTime), two = n => String(n).padStart(2, "0");
  const day = d => [d.getFullYear(), d.getMonth() + 1, d.getDate()].map(two).join("-");
  const clock = [d.getHours(), d.getMinutes(), d.getSeconds()].map(two).join(":");
  e.textContent = (day(d) === day(new Date()) ? "" : day(d) + " ") + clock;
}
